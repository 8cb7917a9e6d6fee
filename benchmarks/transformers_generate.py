#!/usr/bin/env python3
"""The baseline: transformers' own `generate` on a checkpoint, timed on request.

A worker of `speed.py`: loads the model once, prints a line that describes itself, then answers each
JSON line {"prompts": [[...]], "batch": n, "new_tokens": k} with {"seconds": s}. Greedy, the
end-of-sequence token ignored, SDPA attention; prompts of equal length go in batches of `batch`.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    """One static batch; checks that everything asked for was generated."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    if out.shape != (len(prompts), ids.shape[1] + new_tokens):
        raise RuntimeError(f"generate returned {tuple(out.shape)}")


def main() -> None:
    path, dtype = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.eval()
    about = {
        "baseline": f"transformers {transformers.__version__} generate, sdpa",
        "experts": str(getattr(model.config, "_experts_implementation", None)),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(work["prompts"]), work["batch"]):
                generate(model, work["prompts"][first : first + work["batch"]], work["new_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
