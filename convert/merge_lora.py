"""A base and a PEFT LoRA adapter become one GGUF, with its head, a run-time adapter and a manifest beside it.

python -m convert.merge_lora BASE ADAPTER OUT.gguf [--quant f16|q8_0|q4_0|q4_k_m] [--layers N]
python -m convert.merge_lora --verify OUT.gguf

BASE: a Hugging Face folder (gemma3_text, safetensors, single or sharded) or a GGUF. Beside OUT.gguf appear
OUT.lora.gguf (for use without merging), OUT.head.safetensors when the adapter has a head, and OUT.json: every sha256,
and the states of a fixed set of prompts where llama.cpp is installed. --verify re-runs them. Everything appears under
its final name only when it is whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from convert.export_head import export_head
from convert.hf_folder import HfFolder, write_gguf
from convert.peft_adapter import Adapter, read_adapter, save_flat, write_lora_gguf
from whetherman_edge.backbone.derive import Scale, derive
from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.errors import ArtifactError, UsageError, WhethermanError

KINDS: Final = ("f16", "q8_0", "q4_0", "q4_k_m")
COSINE_MIN: Final = 0.9999
"""Between two runs of one file; other kernels add up in another order."""
PROMPTS: Final = (
    "What is the capital of Norway?",
    "<start_of_turn>user\nIs it going to rain in Bergen tomorrow?<end_of_turn>\n<start_of_turn>model\n",
    "Überweise 20 € an Zoë, 東京, привет",
    "def f(x):\n\treturn x ** 2  # \u200b\n",
    "one two three four five six seven eight nine ten " * 80,
)


def merge(base: Path, adapter_folder: Path, out: Path, kind: str, n_layers: int | None) -> dict[str, Any]:
    """Write all files; returns the manifest. Raises ArtifactError for inputs that do not fit each other."""
    adapter = read_adapter(adapter_folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".merge-") as scratch_name:
        scratch = Path(scratch_name)
        source, kept, norm = _gguf_of(base, scratch, n_layers, kind)
        highest = max(pair.layer for pair in adapter.pairs)
        if highest >= kept and n_layers is not None:
            adapter = _cut(adapter, kept)
        flat = scratch / "adapter.safetensors"
        rank = save_flat(adapter, flat)
        merged = scratch / "merged.gguf"
        derive(
            source, merged, kind="f16" if kind == "q4_k_m" else kind, n_layers=kept, adapter=flat,
            scale=Scale(rank, float(rank)), progress=_progress("merging"),
        )  # fmt: skip
        if kind == "q4_k_m":
            from whetherman_edge.backbone.quantise import quantise

            quantise(merged, scratch / "quantised.gguf", kind)
            merged = scratch / "quantised.gguf"
        write_lora_gguf(adapter, scratch / "lora.gguf")
        files = {out: merged, out.with_suffix(".lora.gguf"): scratch / "lora.gguf"}
        if adapter.head is not None:
            export_head(adapter.head, norm, scratch / "head.safetensors")
            files[out.with_suffix(".head.safetensors")] = scratch / "head.safetensors"
        manifest = _manifest(base, adapter_folder, adapter, files, kind, kept)
        if importlib.util.find_spec("llama_cpp") is not None:
            manifest["states"] = [[round(float(x), 6) for x in state] for state in states(merged)]
        (scratch / "manifest.json").write_text(json.dumps(manifest) + "\n")
        for final, partial in {**files, out.with_suffix(".json"): scratch / "manifest.json"}.items():
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.chmod(0o644)
            partial.replace(final)
    return manifest


def _gguf_of(base: Path, scratch: Path, n_layers: int | None, kind: str) -> tuple[Path, int, np.ndarray]:
    """A GGUF of the base, the blocks to keep, and the final norm's weights (n_embd,)."""
    if base.is_dir():
        folder = HfFolder(base)
        kept = _kept(n_layers, folder.n_layers)
        path = scratch / "base.gguf"
        write_gguf(folder, path, kept, "f16" if kind == "f16" else "q8_0", _progress("reading the base"))
        return path, kept, folder.norm(f"{folder.prefix}norm.weight")
    count, norm = _read_gguf(base)
    return base, _kept(n_layers, count), norm


def final_norm(base: Path) -> np.ndarray:
    """Weights of the final norm (n_embd,), as they are multiplied with, of a folder or a GGUF."""
    if base.is_dir():
        folder = HfFolder(base)
        return folder.norm(f"{folder.prefix}norm.weight")
    return _read_gguf(base)[1]


def _read_gguf(base: Path) -> tuple[int, np.ndarray]:
    import gguf

    try:
        reader = gguf.GGUFReader(base)
        count = reader.get_field("gemma3.block_count")
        norm = next((t for t in reader.tensors if t.name == "output_norm.weight"), None)
    except OSError as exc:
        raise ArtifactError(f"{base}: expected a Hugging Face folder or a GGUF file: {exc.strerror or exc}") from exc
    except Exception as exc:  # the reader raises ValueError, IndexError or KeyError, as the damage has it
        raise ArtifactError(f"{base.name}: expected a whole GGUF file, {exc}; fetch it again") from exc
    if count is None or norm is None:
        raise ArtifactError(f"{base.name}: expected a GGUF of the gemma3 architecture")
    return int(count.contents()), np.array(norm.data, np.float32)


def _kept(wanted: int | None, there: int) -> int:
    if wanted is not None and not 1 <= wanted <= there:
        raise UsageError(f"--layers: expected 1 to {there}, got {wanted}")
    return there if wanted is None else wanted


def _cut(adapter: Adapter, kept: int) -> Adapter:
    """Without what belongs to blocks that --layers drops."""
    pairs = [pair for pair in adapter.pairs if pair.layer < kept]
    if not pairs:
        raise ArtifactError(f"the adapter changes none of the {kept} blocks that --layers keeps")
    return Adapter(pairs, adapter.head, adapter.rslora, adapter.base_name)


def _manifest(
    base: Path, folder: Path, adapter: Adapter, files: dict[Path, Path], kind: str, kept: int
) -> dict[str, Any]:
    inputs = sorted(p for p in base.iterdir() if p.is_file()) if base.is_dir() else [base]
    return {
        "format": "whetherman-merge",
        "version": 1,
        "base": {p.name: sha256_of(p) for p in inputs},
        "adapter": {p.name: sha256_of(p) for p in sorted(folder.iterdir()) if p.is_file()},
        "adapter_base": adapter.base_name,
        "rslora": adapter.rslora,
        "quantisation": kind,
        "n_layers": kept,
        "files": {final.name: sha256_of(partial) for final, partial in files.items()},
    }


def states(path: Path) -> list[np.ndarray]:
    """Last token's state after the final norm for each of PROMPTS, by llama.cpp. Raises EnvironmentFault without it."""
    from whetherman_edge.backbone.llama import Context, Network

    network = Network(path)
    context = Context(network, layer=network.n_layer, n_cells=2_048, n_seq=1, chunk=256, n_threads=1)
    found = []
    for prompt in PROMPTS:
        ids = [network.bos, *network._tokenize(prompt, special=True)][:2_048]
        context.truncate(0, 0)
        found.append(context.decode(0, ids, 0, (len(ids) - 1,))[0])
    context.close()
    network.close()
    return found


def verify(out: Path) -> float:
    """Least cosine of the prompts' states to the manifest's. Raises ArtifactError when a file or a state differs."""
    from convert.shards import read_json

    manifest = read_json(out.with_suffix(".json"))
    for name, sha256 in manifest["files"].items():
        path = out.parent / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise ArtifactError(f"{name}: is missing or differs from its sha256 in {out.with_suffix('.json').name}")
    if "states" not in manifest:
        raise ArtifactError("the manifest has no states: it was written where llama-cpp-python is not installed")
    least = 1.0
    for mine, theirs in zip(states(out), map(np.array, manifest["states"]), strict=True):
        least = min(least, float(mine @ theirs / (np.linalg.norm(mine) * np.linalg.norm(theirs))))
    if least < COSINE_MIN:
        raise ArtifactError(
            f"{out.name}: a prompt's state has cosine {least:.6f} to the manifest's, expected {COSINE_MIN}"
        )
    return least


def _progress(what: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total:
            sys.stderr.write(f"\r{what}: {done} of {total} tensors" + ("\n" if done == total else ""))

    return show


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("base", nargs="?", type=Path)
    parser.add_argument("adapter", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--quant", choices=KINDS, default="q8_0")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the lowest N blocks")
    parser.add_argument("--verify", type=Path, metavar="OUT.gguf", help="check sha256s and re-run the prompts")
    options = parser.parse_args(arguments)
    try:
        if options.verify is not None:
            print(f"{options.verify.name}: every sha256 as written, least cosine {verify(options.verify):.6f}")
            return 0
        if options.out is None:
            parser.error("expected BASE ADAPTER OUT.gguf, or --verify OUT.gguf")
        manifest = merge(options.base, options.adapter, options.out, options.quant, options.layers)
    except WhethermanError as exc:
        sys.stderr.write(f"merge_lora: {exc}\n")
        return exc.exit_code
    for name, sha256 in manifest["files"].items():
        print(f"{sha256}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
