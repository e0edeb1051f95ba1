"""The APIs' formats: from a request's body to a prompt, and from tokens to a reply."""
