"""Load folders with the first version of `transformers` on the path: `python transformers_reader.py FOLDER...`

Imports nothing of rolljax, so that it runs with another version of the libraries. Prints JSON.
"""

import json
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEXTS = ("hello world", "  two  spaces\n\ttab", "é 😀 ẞ", "a<|end|>b<|user|>c<|extra|>d<s></s>", "")
TALK = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "é?"},
]
PROMPT = [5, 6, 7, 8]


def read(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chat = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    found = {
        "ids": ids,
        "plain": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "texts": [tokenizer.decode(each, skip_special_tokens=True) for each in ids],
        "chat": chat,
        "chat_ids": tokenizer(chat, add_special_tokens=False)["input_ids"],
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    found["dtype"] = str(AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False)
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found["greedy"] = model.eval().generate(torch.tensor([PROMPT]), **how)[0].tolist()
    return found


def main(folders):
    transformers.logging.set_verbosity_error()
    return {"version": transformers.__version__, **{folder: read(folder) for folder in folders}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
