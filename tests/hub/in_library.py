"""What a version of ``transformers`` reads from a folder and writes to one; also run in a process with another version.

    python in_library.py open OUTPUT FOLDER...      what it reads, as JSON, by folder
    python in_library.py write FOLDER TOKENIZER     a ModernBERT whose settings are not the default ones

Imports nothing of this project.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForMaskedLM, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

TEXTS = (
    *("The name is bound to a value.", "Two  spaces, é, and a {}.", "a\x85b ＜s＞ ☃", "a b c " * 30),
    *("{} is ({}), a {} {}.", " {}. un{}ed, val{}: {}", "{}ing {}"),
)
LENGTH = 32


def opened(folder: Path) -> dict[str, Any]:
    """Ids, offsets, tokens and logits of ``TEXTS``, by the classes that choose a class by the files.

    Without a masked-LM head, the hidden states are in the place of the logits.
    """
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    has_head = architecture.endswith("ForMaskedLM")
    kind = AutoModelForMaskedLM if has_head else AutoModel
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    texts = [text.replace("{}", tokenizer.mask_token) for text in TEXTS]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        output = model.eval()(**batch)
        numbers = output.logits if has_head else output.last_hidden_state
    return {
        **{name: values.tolist() for name, values in batch.items()},
        "processed": {**processor(texts[1], return_offsets_mapping=True)},
        "special": [tokenizer.mask_token, tokenizer.mask_token_id, sorted(tokenizer.all_special_tokens)],
        "longest": tokenizer.model_max_length,
        "not loaded": sorted(name for name in info["missing_keys"] if "pooler" not in name),
        "logits": numbers[batch["attention_mask"].bool()].tolist(),
    }


def write(folder: str, source: str) -> None:
    """A small ModernBERT with a tokenizer of ``source``, as this version writes them."""
    config = json.loads(Path(source, "tokenizer_config.json").read_text(encoding="utf-8"))
    roles = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = {"additional_special_tokens": ["[EXTRA]"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(source, "tokenizer.json")), **roles, **extra)
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("cls", "sep", "pad")}
    special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 48}
    positions = {"max_position_embeddings": 48, "local_attention": 8, "global_attn_every_n_layers": 2}
    thetas = {"global_rope_theta": 20_000.0, "local_rope_theta": 500.0}
    names = {"vocab_size": len(tokenizer), **special, **sizes, **positions, **thetas}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**names))
    torch.manual_seed(1)
    for name, values in model.named_parameters():
        torch.nn.init.normal_(values, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    action, output, *folders = sys.argv[1:]
    if action == "write":
        write(output, *folders)
    else:
        read = {folder: opened(Path(folder)) for folder in folders}
        Path(output).write_text(json.dumps({"version": transformers.__version__, "read": read}), encoding="utf-8")
