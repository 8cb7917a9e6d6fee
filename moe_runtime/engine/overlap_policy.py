"""Is it worth running a step as two micro-batches? A small cost model of one rank, from its own steps.

Pure: numbers in, numbers out. Plain, a step costs compute + transport; in two micro-batches the
larger of the two, with the compute's fixed part paid twice. Published systems gain 25 % at 256 tokens per GPU
and lose 41 % at 8: the fixed part decides.
"""

from dataclasses import dataclass, field

FORGETTING = 0.98
MIN_OBSERVATIONS = 8


@dataclass(slots=True)
class LinearFit:
    """seconds = fixed + per_token * tokens, by least squares with exponential forgetting."""

    weight: float = 0.0
    sum_n: float = 0.0
    sum_nn: float = 0.0
    sum_y: float = 0.0
    sum_ny: float = 0.0
    count: int = 0

    def observe(self, tokens: int, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("sum_n", tokens),
            ("sum_nn", tokens * tokens),
            ("sum_y", seconds),
            ("sum_ny", tokens * seconds),
        ):
            setattr(self, name, FORGETTING * getattr(self, name) + value)
        self.count += 1

    def predict(self, tokens: float) -> float:
        """Seconds at `tokens`; seen at one size only, half of the time counts as fixed."""
        spread = self.sum_nn * self.weight - self.sum_n**2
        mean_n, mean_y = self.sum_n / self.weight, self.sum_y / self.weight
        if spread <= 1e-6 * self.sum_nn * self.weight:
            # The slope cannot be seen; half fixed, half proportional is the neutral guess.
            return mean_y * (0.5 + 0.5 * tokens / max(mean_n, 1.0))
        slope = max(0.0, (self.sum_ny * self.weight - self.sum_n * self.sum_y) / spread)
        return max(0.0, mean_y + slope * (tokens - mean_n))


@dataclass(slots=True)
class OverlapModel:
    """Steps of one rank, plain and as two micro-batches: compute, transport, and both together."""

    compute: LinearFit = field(default_factory=LinearFit)
    transport: LinearFit = field(default_factory=LinearFit)
    plain: LinearFit = field(default_factory=LinearFit)
    split: LinearFit = field(default_factory=LinearFit)

    def observe(
        self, *, tokens: int, micro_batches: int, busy: float, compute: float, transport: float
    ) -> None:
        """One step: `busy` seconds in all, `compute` of them without waiting for transport, and the
        `transport` seconds in which transfers were under way, beside compute or not.
        """
        if micro_batches == 2:
            self.split.observe(tokens, busy)
            return
        self.plain.observe(tokens, busy)
        self.compute.observe(tokens, compute)
        self.transport.observe(tokens, transport)

    def gain(self, tokens: int) -> float:
        """Seconds a step of `tokens` would save as two micro-batches; 0 without enough observations.

        What was measured both ways decides; until then the model does.
        """
        if self.plain.count < MIN_OBSERVATIONS:
            return 0.0
        if self.split.count >= MIN_OBSERVATIONS:
            return self.plain.predict(tokens) - self.split.predict(tokens)
        split_compute = 2 * self.compute.predict(tokens / 2)
        return self.plain.predict(tokens) - max(split_compute, self.transport.predict(tokens))
