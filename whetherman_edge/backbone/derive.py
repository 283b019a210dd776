"""The weights that run: a base GGUF's lower blocks, a LoRA adapter added, quantised again, written as one smaller GGUF.

Merging is W + scale * B A in float32, one tensor at a time, on the base's dequantised weights: exactly what the
adapter was trained on. The embedding table is copied as it is (178 of the base's 253 MB; only the rows of tokens in
use are ever paged in). Uses NumPy and the ``gguf`` package, so a user needs neither PyTorch nor transformers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.errors import ArtifactError, EnvironmentFault

F32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

PROJECTIONS: Final[Mapping[str, str]] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
"""Projection of an adapter (names of PEFT and transformers) to the GGUF tensor of a block."""
KINDS: Final = ("f16", "q8_0", "q4_0")
"""Quantisations written here, blocks as llama.cpp's own reference makes them."""
_FILE_TYPES: Final = {"f16": 1, "q4_0": 2, "q8_0": 7}


class Scale(msgspec.Struct, frozen=True):
    """LoRA's rank and alpha. The factor is alpha / r, or alpha / sqrt(r) when rank-stabilised."""

    r: int
    alpha: float
    rslora: bool = False

    @property
    def factor(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)


def derive(
    base: Path,
    target: Path,
    *,
    kind: str,
    n_layers: int,
    adapter: Path | None = None,
    scale: Scale | None = None,
    progress: Progress | None = None,
) -> str:
    """Write ``target`` from ``base``; returns its sha256. Atomic: a half-written file never has the final name.

    base: GGUF of the gemma3 architecture. adapter: safetensors with ``layers.{i}.{projection}.lora_A`` (r, in) and
    ``.lora_B`` (out, r). n_layers: blocks kept, counted from the bottom.

    Raises ArtifactError for a base or an adapter that does not fit, EnvironmentFault without the ``gguf`` package.
    """
    if kind not in KINDS:
        raise ArtifactError(f"expected a quantisation of {', '.join(KINDS)}, got {kind!r}")
    gguf = _library()
    pairs = _read_adapter(adapter, n_layers, scale) if adapter is not None else {}
    reader = _open(gguf, base)
    architecture = _text(reader, "general.architecture")
    if architecture != "gemma3":
        raise ArtifactError(f"base {base.name}: expected the architecture gemma3, it is {architecture!r}")
    n_base = int(_field(reader, "gemma3.block_count"))
    if not 1 <= n_layers <= n_base:
        raise ArtifactError(f"base {base.name}: expected to keep 1 to {n_base} blocks, got {n_layers}")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    try:
        _write(gguf, reader, Path(partial), kind, n_layers, pairs, progress)
        _sync(Path(partial))
        sha256 = sha256_of(Path(partial))
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return sha256


def _library() -> Any:
    try:
        import gguf
    except ImportError as exc:
        raise EnvironmentFault(
            "expected the gguf package, which reads and writes model files; "
            "install it with `pip install 'whetherman-edge[gemma]'`"
        ) from exc
    return gguf


def _open(gguf: Any, base: Path) -> Any:
    try:
        return gguf.GGUFReader(base)
    except OSError as exc:
        raise ArtifactError(f"base {base.name}: cannot be read ({exc.strerror or exc})") from exc
    except Exception as exc:  # the reader raises ValueError, IndexError or KeyError, as the damage has it
        raise ArtifactError(f"base {base.name}: expected a whole GGUF file, {exc}; fetch it again") from exc


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ArtifactError(f"expected a GGUF file with {name}, it has none")
    return field.contents()


def _text(reader: Any, name: str) -> str:
    return str(_field(reader, name))


def _read_adapter(path: Path, n_layers: int, scale: Scale | None) -> dict[str, tuple[F32, F32]]:
    """GGUF tensor name to (scaled B, A), float32."""
    if scale is None:
        raise ArtifactError(f"adapter {path.name}: expected its rank and alpha")
    try:
        arrays = load_file(path)
    except FileNotFoundError as exc:
        raise ArtifactError(f"adapter {path.name}: is missing; reinstall the package") from exc
    except (OSError, SafetensorError) as exc:
        raise ArtifactError(f"adapter {path.name}: expected a safetensors file ({exc}); reinstall the package") from exc
    found: dict[str, tuple[F32, F32]] = {}
    for name in sorted(arrays):
        parts = name.split(".")
        known = len(parts) == 4 and parts[0] == "layers" and parts[2] in PROJECTIONS and parts[1].isdigit()
        if not known or parts[3] not in ("lora_A", "lora_B"):
            raise ArtifactError(f"adapter {path.name}: unknown tensor {name!r}")
        if int(parts[1]) >= n_layers:
            raise ArtifactError(f"adapter {path.name}: {name!r} is above the {n_layers} blocks that are kept")
        if parts[3] == "lora_B":
            continue
        a, b = arrays[name], arrays.get(name[:-1] + "B")
        if b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != scale.r or b.shape[1] != scale.r:
            raise ArtifactError(f"adapter {path.name}: {name!r} and its lora_B do not pair up at rank {scale.r}")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ArtifactError(f"adapter {path.name}: {name!r} holds values that are not finite")
        tensor = f"blk.{parts[1]}.{PROJECTIONS[parts[2]]}.weight"
        found[tensor] = (b.astype(np.float32) * np.float32(scale.factor), a.astype(np.float32))
    n_b = sum(name.endswith("lora_B") for name in arrays)
    if n_b != len(found):
        raise ArtifactError(f"adapter {path.name}: expected a lora_A for every lora_B, {n_b} and {len(found)} found")
    return found


def _write(
    gguf: Any,
    reader: Any,
    path: Path,
    kind: str,
    n_layers: int,
    pairs: Mapping[str, tuple[F32, F32]],
    progress: Progress | None,
) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    _copy_fields(gguf, reader, writer, kind, n_layers)
    kept = [tensor for tensor in reader.tensors if _is_kept(tensor.name, n_layers)]
    missing = set(pairs) - {tensor.name for tensor in kept}
    if missing:
        raise ArtifactError(f"adapter: the base has no tensor {min(missing)!r}")
    # Infos first, data after: the writer streams, so that one tensor at a time is in memory.
    for tensor in kept:
        shape, kind_of = _shape(tensor), _type_of(gguf, tensor, kind)
        writer.add_tensor_info(
            tensor.name,
            gguf.quant_shape_to_byte_shape(shape, kind_of) if kind_of not in _plain(gguf) else shape,
            np.dtype(np.float32 if kind_of == gguf.GGMLQuantizationType.F32 else np.float16)
            if kind_of in _plain(gguf)
            else np.dtype(np.uint8),
            _n_bytes(gguf, shape, kind_of),
            raw_dtype=kind_of,
        )
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, tensor in enumerate(kept):
            writer.write_tensor_data(_data(gguf, tensor, kind, pairs.get(tensor.name)))
            if progress is not None:
                progress(done + 1, len(kept))


def _plain(gguf: Any) -> tuple[Any, Any]:
    return (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)


def _is_kept(name: str, n_layers: int) -> bool:
    return not name.startswith("blk.") or int(name.split(".")[1]) < n_layers


def _shape(tensor: Any) -> tuple[int, ...]:
    """In NumPy's order; the file stores the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _type_of(gguf: Any, tensor: Any, kind: str) -> Any:
    """Norms stay float32 and the embedding table as it is; projections get ``kind``."""
    if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
        return gguf.GGMLQuantizationType[kind.upper()]
    return tensor.tensor_type


def _n_bytes(gguf: Any, shape: tuple[int, ...], kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // int(block) * int(size)


def _data(gguf: Any, tensor: Any, kind: str, pair: tuple[F32, F32] | None) -> npt.NDArray[Any]:
    wanted = _type_of(gguf, tensor, kind)
    if pair is None and wanted == tensor.tensor_type:
        return np.asarray(tensor.data)
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(_shape(tensor))
    if pair is not None:
        b, a = pair
        if weight.shape != (b.shape[0], a.shape[1]):
            raise ArtifactError(
                f"adapter: {tensor.name} is {weight.shape} in the base, the adapter's is {(b.shape[0], a.shape[1])}"
            )
        weight = weight + b @ a
    return np.asarray(gguf.quants.quantize(weight, wanted))


def _copy_fields(gguf: Any, reader: Any, writer: Any, kind: str, n_layers: int) -> None:
    """All metadata of the base; the number of blocks and the file type are the new ones."""
    own = {"gemma3.block_count": n_layers, "general.file_type": _FILE_TYPES[kind]}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, own.get(name, field.contents()), value_type, sub_type=sub_type)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
