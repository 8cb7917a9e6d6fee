#!/usr/bin/env python3
"""Write a small synthetic trace to standard output.

The demo's is `python scripts/make_trace.py > configs/demo_trace.jsonl`. Requests arrive as a Poisson
process, prompt and output lengths are lognormal and clipped, and some prompts begin alike: they carry
the hash id of one of a few popular prefixes (docs/trace.md). All prompts are shorter than a block of
512 tokens, so of two prompts with the same id the shorter one is a prefix of the other. With
`--input-length` and `--output-length` all requests are of these lengths, and no two prompts are alike.
The same arguments give the same file.
"""

import argparse
import json
import math
import random
import sys

POPULAR_PREFIXES = 4


def lognormal(random_: random.Random, *, median: float, sigma: float, low: int, high: int) -> int:
    """A lognormal integer, clipped to [low, high]."""
    return min(high, max(low, round(math.exp(random_.gauss(math.log(median), sigma)))))


def make_trace(*, requests: int, seconds: float, shared: float, seed: int) -> list[dict[str, object]]:
    """Requests with Poisson arrivals at `requests / seconds` per second; a fraction `shared` begins alike."""
    random_ = random.Random(seed)
    now = 0.0
    next_id = POPULAR_PREFIXES
    trace: list[dict[str, object]] = []
    for _ in range(requests):
        if random_.random() < shared:
            hash_id = random_.randrange(POPULAR_PREFIXES)
        else:
            hash_id, next_id = next_id, next_id + 1
        trace.append(
            {
                "timestamp": round(now * 1e3),
                "input_length": lognormal(random_, median=120, sigma=0.8, low=32, high=400),
                "output_length": lognormal(random_, median=20, sigma=0.5, low=8, high=48),
                "hash_ids": [hash_id],
            }
        )
        now += random_.expovariate(requests / seconds)
    return trace


def make_even_trace(
    *, requests: int, seconds: float, input_length: int, output_length: int, seed: int
) -> list[dict[str, object]]:
    """Requests of one length with Poisson arrivals at `requests / seconds` per second."""
    random_ = random.Random(seed)
    now = 0.0
    trace: list[dict[str, object]] = []
    for _ in range(requests):
        trace.append(
            {"timestamp": round(now * 1e3), "input_length": input_length, "output_length": output_length}
        )
        now += random_.expovariate(requests / seconds)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic trace to standard output.")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=12.0, help="expected time of all arrivals")
    parser.add_argument(
        "--shared", type=float, default=0.25, help="fraction of prompts with a popular prefix"
    )
    parser.add_argument("--input-length", type=int, help="of every prompt, with --output-length")
    parser.add_argument("--output-length", type=int, help="of every output, with --input-length")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.input_length is None) != (arguments.output_length is None):
        parser.error("--input-length and --output-length go together")
    of = {name: getattr(arguments, name) for name in ("requests", "seconds", "seed")}
    if arguments.input_length is None:
        trace = make_trace(**of, shared=arguments.shared)
    else:
        trace = make_even_trace(
            **of, input_length=arguments.input_length, output_length=arguments.output_length
        )
    for request in trace:
        sys.stdout.write(json.dumps(request) + "\n")


if __name__ == "__main__":
    main()
