"""Tokens to text and back, without a server."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.text.answer import AnswerText, decode_all
from fastserve_gateway.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from fastserve_gateway.text.files import ModelFilesError
from fastserve_gateway.text.model import TextModel
from fastserve_gateway.text.pieces import PieceTable, byte_level, sentence_piece
from fastserve_gateway.text.stops import StopAutomaton, StopScanner

from .models import END, MERGED_HE, TOOL, VOCAB_SIZE, byte_tokenizer, ids_of, write_model

TOKENIZER = byte_tokenizer()
PIECES = PieceTable(TOKENIZER, byte_level)

TEXTS = {
    "ascii": "hello, world",
    "emoji family": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466!",
    "flags and skin": "\U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "cjk": "\u4f60\u597d\u4e16\u754c",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "combining": "e\u0301a\u0308o\u0302\u0323",
    "rtl": "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "replacement itself": "a\ufffdb",
    "newlines": "a\r\n\tb\x00c",
}

any_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def detokenizer(prompt: Sequence[int] = ()) -> ByteDetokenizer:
    return ByteDetokenizer(PIECES, prompt)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    decoder = detokenizer()
    pieces = [decoder.push(token_id) for token_id in ids_of(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert "".join(pieces) == text, "nothing is left for the end when the bytes are complete"
    assert all("\ufffd" not in piece for piece in pieces if text != TEXTS["replacement itself"])


@given(any_ids)
def test_any_ids_decode_like_the_whole(ids: list[int]) -> None:
    """The tokenizer's own decoding of everything at once is the oracle, invalid bytes included."""
    known = [token_id for token_id in ids if token_id <= TOOL]
    assert decode_all(detokenizer(), known) == TOKENIZER.decode(known)


@given(any_ids)
def test_window_agrees_with_the_exact_decoder_on_valid_text(ids: list[int]) -> None:
    """Where text is valid, the general method and the exact one agree."""
    text = "".join(chr(0x20 + i) if i < 0x60 else chr(0x4E00 + i) for i in ids)
    tokens = ids_of(text)
    assert decode_all(WindowDetokenizer(TOKENIZER), tokens) == text


@given(st.text(max_size=12), st.integers(0, 3), any_ids)
def test_prompt_never_leaks_into_the_answer(prompt: str, cut: int, ids: list[int]) -> None:
    """A prompt cut in mid-character: prompt + answer is the whole text when the answer completes the character, and
    the answer alone, decoded by itself, when it does not."""
    known = [token_id for token_id in ids if token_id < 256]
    tokens = ids_of(prompt)
    head = tokens[: len(tokens) - min(cut, len(tokens))]
    answer = decode_all(detokenizer(head), known)
    alone = bytes(known).decode("utf-8", "replace")
    whole = bytes([*head, *known]).decode("utf-8", "replace")
    assert answer == alone or whole.endswith(answer)
    if cut == 0:
        assert answer == alone


def test_completed_character_belongs_to_the_answer() -> None:
    head, tail = ids_of("\u4f60")[:2], ids_of("\u4f60")[2:]
    decoder = detokenizer([*ids_of("hi "), *head])
    assert decoder.push(tail[0]) == "\u4f60"
    assert decoder.push(ord("!")) == "!"


def test_dangling_prompt_bytes_vanish_when_not_completed() -> None:
    decoder = detokenizer([*ids_of("hi "), *ids_of("\u4f60")[:2]])
    assert decoder.push(ord("A")) + decoder.flush() == "A"


def test_special_token_separates_prompt_bytes_from_the_answer() -> None:
    decoder = detokenizer([*ids_of("\u4f60")[:2], END])
    assert decoder.push(ids_of("\u4f60")[2]) == "\ufffd"


def test_special_tokens_and_padding_ids_are_no_text() -> None:
    assert decode_all(detokenizer(), [MERGED_HE, END, TOOL, VOCAB_SIZE - 1, 33]) == "he<tool call>!"


# --- the SentencePiece family


def sentence_piece_tokenizer() -> Tokenizer:
    words = ["\u2581hi", "\u2581you", "\u4f60", "!", "\u2581"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {word: 257 + k for k, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_byte_fallback_tokens_make_characters() -> None:
    pieces = PieceTable(sentence_piece_tokenizer(), sentence_piece)
    decoder = ByteDetokenizer(pieces, [257])
    ids = [258, *(byte + 1 for byte in "\U0001f600".encode()), 259, 260]
    assert [decoder.push(token_id) for token_id in ids] == [" you", "", "", "", "\U0001f600", "\u4f60", "!"]


def test_model_folder_chooses_the_family(tmp_path: Path) -> None:
    spm = TextModel(write_model(tmp_path / "spm", tokenizer=sentence_piece_tokenizer()))
    assert isinstance(spm.detokenizer(()), ByteDetokenizer)
    assert spm.longest_piece_bytes is None, "a normalizer may shorten the text: no bound"
    word = Tokenizer(models.WordPiece({"[UNK]": 0, "new": 1, "##er": 2, "!": 3}, unk_token="[UNK]"))
    word.decoder = decoders.WordPiece()
    word.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece = TextModel(write_model(tmp_path / "word", tokenizer=word))
    window = wordpiece.detokenizer([1])
    assert isinstance(window, WindowDetokenizer)
    assert decode_all(window, [2, 1, 2]) == "er newer"
    spm.close()
    wordpiece.close()


def test_window_stays_bounded_on_endless_invalid_bytes() -> None:
    decoder = WindowDetokenizer(TOKENIZER)
    text = "".join(decoder.push(0xFF) for _ in range(200))
    assert len(decoder._ids) <= 2 * WindowDetokenizer.MAX_PENDING + 2
    assert len(text + decoder.flush()) == 200


# --- stop strings

letters = st.text("abc", min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Earliest end, then longest: by looking at every prefix."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(st.text("abcd", max_size=30), st.lists(letters, min_size=1, max_size=4), st.booleans(), st.data())
def test_stops_do_not_depend_on_the_cuts(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    scanner = StopScanner(StopAutomaton(stops), include_stop=include)
    shown, stop = "", None
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stop = scanner.push(text[start:end])
        shown += piece
        if stop is not None:
            break
        held = text[:end][len(shown) :]
        assert any(stop_string.startswith(held) for stop_string in stops) or not held, "held back for nothing"
    else:
        shown += scanner.flush()
    assert (shown, stop) == reference(text, stops, include)


def test_shorter_overlapping_stop_wins_by_ending_first() -> None:
    scanner = StopScanner(StopAutomaton(["abc", "ab"]), include_stop=False)
    assert scanner.push("xabc") == ("x", "ab")


def test_stop_that_may_not_stop_yet_is_text() -> None:
    scanner = StopScanner(StopAutomaton(["ab"]), include_stop=False)
    assert scanner.push("ab", may_stop=False) == ("", None)
    assert scanner.push("cab") == ("abc", "ab")


@given(any_ids, st.lists(st.text("he\u4f60\ufffd!", min_size=1, max_size=3), max_size=2), st.booleans())
def test_answer_text_is_the_same_for_any_ids(ids: list[int], stops: list[str], include: bool) -> None:
    """Deltas of the full chain add up to: decode everything, then cut at the stop."""
    scanner = StopScanner(StopAutomaton(stops), include_stop=include) if stops else None
    answer = AnswerText(detokenizer(), scanner)
    shown, stop = "", None
    for token_id in ids:
        step = answer.push(token_id, may_stop=True)
        shown, stop = shown + step.text, step.stop_string
        if stop is not None:
            break
    else:
        step = answer.finish(may_stop=True)
        shown, stop = shown + step.text, step.stop_string
    assert (shown, stop) == reference(decode_all(detokenizer(), ids), stops, include)


# --- model folders and chat templates


async def test_chat_template_renders_and_refuses(tmp_path: Path) -> None:
    model = TextModel(write_model(tmp_path))
    assert model.eos_token_ids == {258, 259}
    text = await model.render_chat(
        [{"role": "user", "content": "<b>"}], add_generation_prompt=True, variables={"quiet": True}
    )
    assert text == "<user><b><|end|><assistant>shh"
    with pytest.raises(InvalidArgumentError, match="no tools here"):
        await model.render_chat([{"role": "tool", "content": ""}], add_generation_prompt=True, variables={})
    model.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1/0 }}",
        "{{ undefined.x.y }}",
        "{{ messages[9].x }}",
    ],
)
async def test_template_failures_are_the_callers_error(tmp_path: Path, template: str) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    model = TextModel(folder)
    with pytest.raises(InvalidArgumentError):
        await model.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=True, variables={})
    model.close()


async def test_template_dialect(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    model = TextModel(folder)
    text = await model.render_chat(
        [{"role": "user", "content": "<\u4f60>"}, {"role": "user", "content": "second"}],
        add_generation_prompt=False,
        variables={},
    )
    assert text == '{"role": "user", "content": "<\u4f60>"}4'
    model.close()


async def test_model_without_template_says_so(tmp_path: Path) -> None:
    model = TextModel(write_model(tmp_path, chat=False))
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        await model.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=True, variables={})
    model.close()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no readable tokenizer.json"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("chat_template.jinja", "{% if %}", "does not parse"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, name: str, content: str | None, problem: str) -> None:
    folder = write_model(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ModelFilesError, match=problem):
        TextModel(folder)


async def test_long_texts_leave_the_loop(tmp_path: Path) -> None:
    model = TextModel(write_model(tmp_path))
    text = "hello " * 5000
    ids = await model.encode(text, add_special_tokens=True)
    assert await model.decode(ids) == text
    model.close()


def test_added_tokens_without_letters_of_the_alphabet_stand_for_themselves() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("\u4f60 \u597d", special=False)])
    decoder: Detokenizer = ByteDetokenizer(PieceTable(tokenizer, byte_level))
    token_id = tokenizer.token_to_id("\u4f60 \u597d")
    assert token_id is not None
    assert decoder.push(token_id) == "\u4f60 \u597d"
