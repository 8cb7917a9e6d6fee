"""New weights between steps: nothing that the old ones wrote is read again, and no request is lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.scheduler.scheduler import Scheduler
from tests.scheduler.fake_device import POISON, Runner, expected_output
from tests.scheduler.test_prefix import ask, family_of_prompts
from tests.scheduler.test_scheduler import limits


def change_weights(runner: Runner) -> None:
    """As the engine does in a step of its own: what was proposed is not run, what is in flight comes back."""
    runner.scheduler.propose()
    runner._commit(0)
    runner.scheduler.forget_kv()
    runner.device.kv[:] = POISON


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    depth=st.integers(0, 1),
    chunk=st.sampled_from([3, 16]),
    blocks=st.sampled_from([16, 64]),
)
def test_requests_go_on_from_the_tokens_they_have(seed, depth, chunk, blocks):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(
        limits(chunk_tokens=chunk, num_blocks=blocks, max_sequences=int(rng.integers(1, 6)))
    )
    runner = Runner(scheduler, depth)
    wanted, sequences = {}, []
    for i, prompt in enumerate(family_of_prompts(rng, 10)):
        max_tokens = int(rng.integers(1, 16))
        sequences.append(ask(i, prompt, max_tokens))
        scheduler.add(sequences[-1])
        wanted[i] = expected_output(prompt, max_tokens)
        for _ in range(int(rng.integers(0, 12))):
            runner.step()
        if rng.random() < 0.5:
            change_weights(runner)
    runner.run()
    assert runner.outputs == wanted
    assert scheduler.pool.num_free == blocks
    # Prompt tokens count once, however often they are computed.
    assert runner.fresh + runner.cached == sum(s.prompt_len for s in sequences)


def test_prefixes_of_the_old_weights_are_not_found():
    runner = Runner(Scheduler(limits()), 0)
    prompt = list(range(1, 17))
    for i, found in enumerate((0, 12)):
        sequence = ask(i, prompt)
        runner.scheduler.add(sequence)
        runner.run()
        assert sequence.cached_tokens == found
    change_weights(runner)
    assert runner.scheduler.pool.num_idle == 0
    sequence = ask(2, prompt)
    runner.scheduler.add(sequence)
    runner.run()
    assert sequence.cached_tokens == 0
    assert runner.outputs[2] == runner.outputs[0]
