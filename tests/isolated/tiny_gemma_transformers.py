"""transformers and PEFT against the NumPy arithmetic of the tests of convert/; run by hand where they are installed.

python -m tests.isolated.tiny_gemma_transformers     (extra: convert)

A rank-stabilised adapter with ranks and alphas of their own. Prints the least cosine with and without it; exits 1 below
0.999999.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tests.convert.tiny_gemma as tiny

COSINE_MIN = 0.999999
RANKS = {"self_attn.q_proj": 4, "self_attn.o_proj": 4, "mlp.up_proj": 2, "mlp.down_proj": 4}
SCALES = {"self_attn.q_proj": 4.0, "self_attn.o_proj": 4.0, "mlp.up_proj": 3 / 2**0.5, "mlp.down_proj": 4.0}


def main() -> int:
    import torch
    from peft import PeftModel
    from transformers import Gemma3ForCausalLM

    rng = np.random.default_rng(8)
    prompts = [[2, *rng.integers(6, len(tiny.PIECES), n).tolist()] for n in (3, 12, 40, 70, 200)]
    arrays, weights = tiny.adapter_tensors(RANKS), tiny.tensors()

    def least(inner: Any, own: dict[str, tiny.F32]) -> float:
        found = 1.0
        for ids in prompts:
            with torch.no_grad():
                theirs = inner(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy()
            mine = tiny.forward(own, ids)
            found = min(found, float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs)))
        return found

    with tempfile.TemporaryDirectory() as name:
        base, adapter = Path(name) / "base", Path(name) / "adapter"
        tiny.write_base(base)
        tiny.write_adapter(
            adapter, arrays, use_rslora=True, rank_pattern={"up_proj": 2}, alpha_pattern={"mlp.up_proj": 3},
            target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM",
        )  # fmt: skip
        model = Gemma3ForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        plain = least(model.model, weights)
        adapted = PeftModel.from_pretrained(model, adapter).eval().get_base_model().model
        with_lora = least(adapted, tiny.with_lora(weights, arrays, SCALES))
    print(f"least cosine: base {plain:.7f}, with PEFT {with_lora:.7f}")
    return int(min(plain, with_lora) < COSINE_MIN)


if __name__ == "__main__":
    sys.exit(main())
