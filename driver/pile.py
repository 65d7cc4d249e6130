"""Updates of one request that are joined to one, because whoever they are for has not come to read them yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from driver.engine import Update
from scheduler.logprobs import TokenLogprobs


@dataclass(slots=True)
class Pile:
    """last: the newest update. logprobs, prompt_logprobs: None while no update has had any."""

    last: Update
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, update: Update) -> None:
        self.last = update
        self.texts.append(update.text)
        self.token_ids += update.token_ids
        if update.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += update.logprobs
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs

    def joined(self) -> Update:
        return replace(
            self.last,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
