"""A tokenizer for stages without a model: one word per id."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: What fake stages draw from; every id is a word.
FAKE_VOCAB_SIZE = 1024


def write_words(folder: Path, form: str = "w{}") -> Path:
    """A folder with a tokenizer and no weights. `form`: how a word looks, with its id in it."""
    folder.mkdir(exist_ok=True)
    vocab = {form.format(i): i for i in range(FAKE_VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=form.format(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "config.json").write_text(json.dumps({"vocab_size": FAKE_VOCAB_SIZE, "eos_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder
