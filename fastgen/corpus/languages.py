"""First tokens of outputs, by name: languages, if the tokenizer knows them, or any other token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastgen.errors import CommandError


class Unknown(ValueError):
    """Error: the tokenizer does not know a name."""


class Names:
    """A tokenizer's names of tokens and languages.

    Args:
        tokenizer: a tokenizer of transformers.
        folder: the folder that it comes from, for messages.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder

    @property
    def begins_with_language(self) -> bool:
        """Whether the language replaces the start token of outputs, as in the first mBART.

        All other models that know languages begin with the start token and force the language after
        it.
        """
        return type(self.tokenizer).__name__.removesuffix("Fast") == "MBartTokenizer"

    def token(self, name: str) -> int:
        """Return the id of a token.

        Raises:
            Unknown: there is no such token.
        """
        token = self.tokenizer.convert_tokens_to_ids(name)
        if token is None or (
            token == self.tokenizer.unk_token_id and name != self.tokenizer.unk_token
        ):
            raise Unknown(f"{name!r} is no token of {self.folder}")
        return int(token)

    def language(self, name: str) -> int:
        """Return the id of a language's token.

        Raises:
            Unknown: there is no such language. An ordinary token with the same spelling does not
                count.
            CommandError: the tokenizer knows no languages.
        """
        self.check_languages()
        tokens = getattr(self.tokenizer, "lang_code_to_token", {})
        known = {*tokens, *tokens.values(), *getattr(self.tokenizer, "lang_code_to_id", ())}
        if name not in (known or self.tokenizer.all_special_tokens):
            raise Unknown(f"{name!r} is no language of {self.folder}")
        return self.token(tokens.get(name, name))

    def code(self, name: str) -> str:
        """Return the tokenizer's code of a language, given the code or its token."""
        tokens: dict[str, str] = getattr(self.tokenizer, "lang_code_to_token", {})
        return next((code for code, token in tokens.items() if token == name), name)

    def check_languages(self, each: str | None = None) -> None:
        """Raise CommandError if the tokenizer knows no languages, or not one for each output.

        Args:
            each: the option that requests a language for each output; None if there is none.
        """
        if not hasattr(self.tokenizer, "src_lang"):
            raise CommandError(
                f"{each or '--source-lang, --target-lang'}: "
                f"a {type(self.tokenizer).__name__} knows no languages; "
                "--prefix and --forced-bos-token may say what is wanted"
            )
        if each is not None and self.begins_with_language:
            raise CommandError(
                f"{each}: a {type(self.tokenizer).__name__} has the language in the place of the "
                "start token, of which there is one for all texts; --target-lang names it"
            )
