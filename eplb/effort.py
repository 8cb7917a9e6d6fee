"""How hard the solver tries, in units of work: the answer never depends on how fast the machine is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Budgets of each layer, and the gap at which a layer is done.

    tolerance     relative gap to the larger of the mean load and the least largest share
    swap_rounds   rounds of swaps off half the ranks, as many off a quarter, and so on
    peak_rounds   swaps off the heaviest rank
    recounts      replicas passed on in the search for better counts of them (two slots a rank)
    givers        experts each of them may be taken from
    patience      pairs after the heaviest that are tried when none of the exchanges for it helps
    sweeps        levelling of split weights
    weighted_rounds  alternations of levelling and swapping, when the split is weighted
    steps         changes on the road from a current plan
    bound_steps   bisections of the bound
    """

    tolerance: float
    swap_rounds: int
    peak_rounds: int
    recounts: int
    givers: int
    patience: int
    sweeps: int
    weighted_rounds: int
    steps: int
    bound_steps: int


EFFORTS = {
    "default": Effort(
        tolerance=0.005,
        swap_rounds=2,
        peak_rounds=48,
        recounts=2,
        givers=4,
        patience=0,
        sweeps=3,
        weighted_rounds=0,
        steps=64,
        bound_steps=5,
    ),
    "best": Effort(
        tolerance=0.0005,
        swap_rounds=6,
        peak_rounds=160,
        recounts=40,
        givers=16,
        patience=1,
        sweeps=20,
        weighted_rounds=3,
        steps=256,
        bound_steps=12,
    ),
}
