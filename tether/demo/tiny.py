"""A model of the demo's size for a test machine: two random layers and a tokenizer of the data's own words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tether.demo.world import read_rows

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
SPECIAL = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]


def make_tiny_model(pairs: Path, folder: Path, *, words: int = 300, seed: int = 0) -> Path:
    """A Llama of two layers over the most frequent words of `pairs`, saved as a model folder. It knows nothing."""
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from tether.models import save_model

    texts = [turn["content"] for row in read_rows(pairs) for key in ("prompt", "chosen", "rejected") for turn in row[key]]
    common = [word for word, _ in Counter(w for text in texts for w in text.split()).most_common(words) if word not in SPECIAL]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *common])}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=TEMPLATE, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(common),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return save_model(model, tokenizer, folder)
