"""Small tokenizers of every kind of decoder, with the chat templates that go with them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}<s>[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
WORDS = ["\u2581a", "\u2581b", "c", "\u2581", "</s>", "\u2581STOP", "ST", "OP", "<s>", *"abSTOPhinqrostx[]/:>", "\n"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "  "]
"""Added tokens that are not special."""


def _bytes_and(words):
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    return vocab | {w: 256 + i for i, w in enumerate(dict.fromkeys(words))}


def _fast(core, template=None, specials=("<s>", "</s>"), markers=()):
    core.add_special_tokens(list(specials))
    core.add_tokens([AddedToken(m, normalized=False, special=False) for m in markers])
    eos = specials[-1]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, chat_template=template, clean_up_tokenization_spaces=False
    )


def llama(template=INST):
    """Return a tokenizer like Llama 2's: spaces as U+2581, one before every text, bytes for missing tokens, the first
    space stripped."""
    merges = [("\u2581", "a"), ("\u2581", "b"), ("S", "T"), ("O", "P")]
    core = Tokenizer(models.BPE(vocab=_bytes_and(WORDS), merges=merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(core, template)


def metaspace(template=CHATML):
    """Return a tokenizer like newer ones of Mistral and like T5's: the Metaspace decoder, and ChatML."""
    specials = ("<|im_start|>", "<|im_end|>")
    vocab = {w: i for i, w in enumerate(dict.fromkeys(["<unk>", *WORDS, *"userqitoandlmy"]))}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("S", "T"), ("O", "P")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    return _fast(core, template, specials)


def gemma():
    """Return a tokenizer like Gemma's: spaces as U+2581, none before a text and none stripped, bytes for missing
    tokens."""
    core = Tokenizer(models.BPE(vocab=_bytes_and(WORDS), merges=[("\u2581", "a")], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _fast(core, CHATML, ("<|im_start|>", "<|im_end|>"))


def qwen(normalizer=None):
    """Return a tokenizer like Qwen's: bytes, and added tokens that are not special."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {w: 256 + i for i, w in enumerate(["to", "too", "tool", "le"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "o"), ("to", "o"), ("too", "l"), ("l", "e")]))
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _fast(core, CHATML, ("<|im_start|>", "<|im_end|>"), MARKERS)


def words():
    """Return a tokenizer like BERT's: words and their endings; the decoder makes the spaces between words."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "a", "b", "##b", "stop", "##s", "x"])}
    core = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(cleanup=False)
    return _fast(core, None, ("<s>", "</s>"))


ALL = {"llama": llama, "metaspace": metaspace, "gemma": gemma, "qwen": qwen, "words": words}
