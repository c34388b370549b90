"""The bytes and the text of single tokens, for reporting log-probabilities."""

from __future__ import annotations

import json
import re

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Looks up what a token id stands for. It may be part of a character only, so bytes are sure."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        decoders = _decoder_types(json.loads(self._backend.to_str()).get("decoder"))
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_tokens = "ByteFallback" in decoders
        self._bytes_of_char = _byte_level_alphabet()

    def bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for an id that is no token."""
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return b"".join(self._bytes_of_char.get(char) or char.encode() for char in piece)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def text(self, token: int) -> str:
        """The token's text; where its bytes are no text, ``bytes:`` and the bytes in hexadecimal."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _decoder_types(decoder: dict | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_types(part) for part in decoder.get("decoders", ())))


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's characters for bytes: printable ones are themselves, the others go from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}
