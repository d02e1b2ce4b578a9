"""`EngineConfig`: which program samples during training, and how it is reached. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tether.http_json import is_address
from tether.keys import SettingError
from tether.settings import Settings
from tether.values import Count, OptionalCount, OptionalText, OptionalTexts, Positive, texts


def words(value: Any) -> list[str]:
    """A list of texts, where a number stands for itself: [--tensor-parallel-size, 2]."""
    if isinstance(value, (list, tuple)):
        value = [str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v for v in value]
    return texts(value)


class EngineConfig(Settings):
    """Who samples: `local` is this process; `vllm` are servers, running ones (`urls`) or ones that the run starts and ends itself."""

    engine: Literal["local", "vllm"] = Field(
        default="vllm", description="Which program samples: local (this process) or vllm (servers); a block without it means vllm."
    )
    urls: OptionalTexts = Field(
        default=None,
        description="Addresses of vLLM servers that run already, such as [http://localhost:8000]; null: the run starts its own.",
    )
    start: Count = Field(
        default=1, description="Servers that the run starts on this machine; more sample faster, and each loads the model."
    )
    port: OptionalCount = Field(default=None, description="Port of the first server that is started, the others follow; null: free ones.")
    python: OptionalText = Field(
        default=None, description="The Python that has vLLM, such as .venv-vllm/bin/python; null: the one that Tether runs in."
    )
    options: Annotated[list[str], BeforeValidator(words)] = Field(
        default=[], description="More arguments for servers that are started, such as [--tensor-parallel-size, 2]."
    )
    model: OptionalText = Field(default=None, description="Name under which running servers serve the model; null: the first they list.")
    weights: OptionalText = Field(
        default=None, description="Folder for weights on their way to the servers, which must see it under this path; null: in the run."
    )
    key_env: OptionalText = Field(default=None, description="Environment variable that holds the servers' key; null: they ask for none.")
    timeout_s: Positive = Field(
        default=600.0, description="Seconds that an answer may take before the server counts as failing; longer than the longest answer."
    )
    start_timeout_s: Positive = Field(default=900.0, description="Seconds that a server which is started may take until it answers.")

    @property
    def remote(self) -> bool:
        return self.engine != "local"

    @model_validator(mode="after")
    def _engine_settings_agree(self) -> Self:
        others = sorted(self._changed() - {"engine"})
        if not self.remote and others:
            raise SettingError("only acts with engine: vllm", key=others[0], remedy="Set engine.engine: vllm, or leave it out.")
        if self.urls is None:
            if self.model is not None:
                raise SettingError("only acts with urls: a server that is started gets a name of its own", key="model")
            if self.port is not None and self.port + self.start - 1 > 65535:
                raise SettingError(f"must be at most {65536 - self.start}, got {self.port}", key="port")
            return self
        for key in ("start", "port", "python", "options", "start_timeout_s"):
            if key in others:
                raise SettingError("is for servers that are started, and urls names servers that run already", key=key, remedy="Keep one.")
        for url in self.urls:
            if not is_address(url):
                raise SettingError(f"{url!r} is no http address", key="urls", remedy="Such as http://localhost:8000.")
        return self

    def _changed(self) -> set[str]:
        return {name for name, info in type(self).model_fields.items() if getattr(self, name) != info.default}

    def __str__(self) -> str:
        return str(self.plain())

    def plain(self) -> str | dict[str, Any]:
        """As a recipe has it: a word where nothing else is said."""
        changed = self._changed() - {"engine"}
        return {"engine": self.engine, **{name: getattr(self, name) for name in sorted(changed)}} if changed else self.engine


LOCAL = EngineConfig(engine="local")


def engine_of(value: Any) -> Any:
    """A word, or a block (which `Settings` has built by now)."""
    if isinstance(value, str):
        names = ("local", "vllm")
        if value not in names:
            raise ValueError(f"{value!r} is not one of: {', '.join(names)}; other servers would need a client of their own")
        return EngineConfig.model_validate({"engine": value})
    if isinstance(value, (EngineConfig, Mapping)):
        return value
    raise ValueError("local or vllm is wanted, or a block such as {urls: [http://localhost:8000]}")
