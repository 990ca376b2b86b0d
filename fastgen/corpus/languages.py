"""The tokens that outputs begin with, by their names: languages, of tokenizers that know such, or any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastgen.errors import CommandError


class Unknown(ValueError):
    """A name that the tokenizer does not know."""


class Names:
    """What a tokenizer calls its tokens and languages.

    Attributes:
        tokenizer: of transformers; its source language is set here.
        folder: that it comes from, for messages.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder

    @property
    def begins_with_language(self) -> bool:
        """Whether outputs have the language in the place of the start token, as those of the first mBART do.

        All other models that know languages begin with the start token, and force the language behind it.
        """
        return type(self.tokenizer).__name__.removesuffix("Fast") == "MBartTokenizer"

    def token(self, name: str) -> int:
        """The id of a token.

        Raises:
            Unknown: there is no such token.
        """
        found = self.tokenizer.convert_tokens_to_ids(name)
        if found is None or (
            found == self.tokenizer.unk_token_id and name != self.tokenizer.unk_token
        ):
            raise Unknown(f"{name!r} is no token of {self.folder}")
        return int(found)

    def language(self, name: str) -> int:
        """The token of a language.

        Raises:
            Unknown: there is no such language. A piece of a word that is spelt so is none.
            CommandError: the tokenizer knows no languages.
        """
        self.check_languages()
        tokens = getattr(self.tokenizer, "lang_code_to_token", {})
        known = {*tokens, *tokens.values(), *getattr(self.tokenizer, "lang_code_to_id", ())}
        if name not in (known or self.tokenizer.all_special_tokens):
            raise Unknown(f"{name!r} is no language of {self.folder}")
        return self.token(tokens.get(name, name))

    def code(self, name: str) -> str:
        """What the tokenizer calls a language, by that or by its token."""
        tokens: dict[str, str] = getattr(self.tokenizer, "lang_code_to_token", {})
        return next((code for code, token in tokens.items() if token == name), name)

    def check_languages(self, each: str | None = None) -> None:
        """Raise CommandError where the tokenizer knows no languages, or outputs cannot have one each.

        each: the option that asks for that.
        """
        if not hasattr(self.tokenizer, "src_lang"):
            raise CommandError(
                f"{each or '--source-lang, --target-lang'}: a {type(self.tokenizer).__name__} knows no languages; "
                "--prefix and --forced-bos-token may say what is wanted"
            )
        if each is not None and self.begins_with_language:
            raise CommandError(
                f"{each}: a {type(self.tokenizer).__name__} has the language in the place of the start token, of which "
                "there is one for all texts; --target-lang names it"
            )
