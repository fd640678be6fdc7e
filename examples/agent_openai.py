"""An agent with its own loop and its own tool: it knows OpenAI's client, and nothing of rolljax.

    python -m rolljax.train --gin configs/agent_program.gin

Every line of stdin is a task: where the model is, and the messages it begins with. The model may write `calc(4817*93)`;
the agent works that out, tells the model, and takes what it writes then for the answer, which it prints. The same file
works with any server of that API:

    echo '{"id": "1", "messages": [{"role": "user", "content": "4817*93="}], "base_url": "...", "api_key": "..."}' |
        python examples/agent_openai.py
"""

import json
import re
import sys

import openai

CALL = re.compile(r"calc\((\d{1,12})([-+*])(\d{1,12})\)")
MAX_CALLS = 1


def calc(left: int, operator: str, right: int) -> int:
    """Compute the tool's result."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def answer(task: dict) -> str:
    """Talk to the model until it answers without a call."""
    messages = list(task["messages"])
    with openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
        for turn in range(MAX_CALLS + 1):
            reply = client.chat.completions.create(model="policy", messages=messages, temperature=0.7)
            text = reply.choices[0].message.content or ""
            call = CALL.fullmatch(text.strip())
            if call is None or turn == MAX_CALLS:
                break
            result = calc(int(call[1]), call[2], int(call[3]))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(result)}]
    return text


for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"id": task["id"], "answer": answer(task)}), flush=True)
