"""Which class is "this architecture with a score head", and a padding mark that is not an end mark."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

from tether.errors import UserError


def classifier_class(config: Any, where: str) -> Any:
    """The architecture's `...ForSequenceClassification`; where transformers has none, one made of its own generic part.

    A folder of the second kind has the same layout, but only Tether loads it.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if type(config) not in MODEL_MAPPING:
        raise UserError(
            f"{type(config).__name__} is not a text model that can carry a score head", where=where, remedy="Use another model."
        )
    trunk: Any = MODEL_MAPPING[type(config)]
    trunk = trunk[0] if isinstance(trunk, tuple) else trunk
    family = next(c for c in trunk.__mro__ if issubclass(c, PreTrainedModel) and c.__name__.endswith("PreTrainedModel"))
    name = trunk.__name__.removesuffix("Model") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, family), {})


def set_pad_token(model: Any, tokenizer: Any) -> None:
    """Give model and tokenizer a padding mark that no answer ends with.

    Tether itself never pads. transformers reads the score at the last token that is not padding: with pad equal to the end
    mark, that is the token before the end.
    """
    config = model.config.get_text_config()
    stated = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = {tokenizer.eos_token_id, *stated} - {None}
    named = [i for token, i in tokenizer.get_added_vocab().items() if "pad" in token.lower()]
    candidates = [config.pad_token_id, tokenizer.pad_token_id, *sorted(named), tokenizer.unk_token_id, tokenizer.bos_token_id]
    pad = next((i for i in candidates if i is not None and i not in ends and 0 <= i < config.vocab_size), None)
    config.pad_token_id = model.config.pad_token_id = pad
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
