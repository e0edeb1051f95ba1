"""What speculation has done so far."""

from __future__ import annotations

from typing import NamedTuple


class Stats(NamedTuple):
    """Counts over the rounds so far; plain decoding has no rounds.

    Attributes:
        rounds: forwards of the target behind the prompt's. The token chosen by the prefill belongs to none.
        drafted: nodes that were verified, roots not counted.
        accepted: drafted tokens that were kept.
        reached: `reached[d]` rounds kept more than d drafted tokens.
        skipped: rounds that drafted nothing.
        replayed: tokens that rounds read again, because the model cannot forget what it has rejected.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    skipped: int = 0
    replayed: int = 0

    def after(self, drafted: int, accepted: int, depth: int, replayed: int = 0) -> Stats:
        """The counts after one more round, of a draft `depth` deep; 0 for none."""
        reached = self.reached + (0,) * (depth - len(self.reached))
        reached = tuple(count + (d < accepted) for d, count in enumerate(reached))
        counts = (self.rounds + 1, self.drafted + drafted, self.accepted + accepted)
        return Stats(*counts, reached, self.skipped + (depth == 0), self.replayed + replayed)

    def plus(self, other: Stats) -> Stats:
        """The counts of two texts together."""
        depth = max(len(self.reached), len(other.reached))
        both = zip(*(counts + (0,) * (depth - len(counts)) for counts in (self.reached, other.reached)), strict=True)
        sums = (self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted)
        return Stats(*sums, tuple(a + b for a, b in both), self.skipped + other.skipped, self.replayed + other.replayed)

    @property
    def tried(self) -> int:
        """Rounds that drafted."""
        return self.rounds - self.skipped

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds; 1.0 before the first round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_per_depth(self) -> tuple[float, ...]:
        """The share of rounds that kept a drafted token at depth 1, 2, ..., K."""
        return tuple(count / self.tried for count in self.reached)

    @property
    def rows_per_round(self) -> float:
        """How many tokens the target read in a round: root, drafted and replayed ones; 0.0 before the first round."""
        return (self.rounds + self.drafted + self.replayed) / self.rounds if self.rounds else 0.0
