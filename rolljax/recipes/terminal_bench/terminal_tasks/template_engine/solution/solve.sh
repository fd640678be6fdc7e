cat > /work/template.py <<'END'
import re

TAG = re.compile(r"(\{\{.*?\}\}|\{%.*?%\})", re.S)


def lookup(name, values):
    for part in name.strip().split("."):
        values = values[part]
    return values


def parse(parts, inside):
    nodes = []
    while parts:
        part = parts.pop(0)
        if part.startswith("{{") and part.endswith("}}"):
            nodes.append(("value", part[2:-2]))
        elif part.startswith("{%") and part.endswith("%}"):
            words = part[2:-2].split()
            if words == ["end"]:
                if not inside:
                    raise ValueError("end without a block")
                return nodes
            if len(words) == 2 and words[0] == "if":
                nodes.append(("if", words[1], parse(parts, True)))
            elif len(words) == 4 and words[0] == "for" and words[2] == "in":
                nodes.append(("for", words[1], words[3], parse(parts, True)))
            else:
                raise ValueError(part)
        else:
            nodes.append(("text", part))
    if inside:
        raise ValueError("a block without an end")
    return nodes


def write(nodes, values):
    made = []
    for kind, *rest in nodes:
        if kind == "text":
            made.append(rest[0])
        elif kind == "value":
            made.append(str(lookup(rest[0], values)))
        elif kind == "if":
            try:
                found = lookup(rest[0], values)
            except KeyError:
                found = False
            made.append(write(rest[1], values) if found else "")
        else:
            made.extend(write(rest[2], {**values, rest[0]: item}) for item in lookup(rest[1], values))
    return "".join(made)


def render(text, values):
    return write(parse(TAG.split(text), False), values)
END
