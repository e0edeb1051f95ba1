"""Trains a drafter for a frozen target, from data to the finished directory."""
