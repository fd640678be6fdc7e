cat > /work/calc.py <<'END'
"""A calculator for whole numbers: `+ - * /` and brackets, by recursive descent."""

import re
import sys

sys.setrecursionlimit(20000)
sys.set_int_max_str_digits(0)


class Parser:
    def __init__(self, line):
        self.tokens = re.findall(r"[0-9]+|\S", line, re.ASCII)
        self.at = 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self):
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def total(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self):
        value = self.signed()
        while self.peek() in ("*", "/"):
            value = value * self.signed() if self.take() == "*" else value // self.signed()
        return value

    def signed(self):
        token = self.take()
        if token == "-":
            return -self.signed()
        if token == "(":
            value = self.total()
            if self.take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if not re.fullmatch("[0-9]+", token):
            raise ValueError("a number is missing")
        return int(token)


for line in sys.stdin:
    parser = Parser(line)
    try:
        value = parser.total()
        print("error" if parser.peek() else value)
    except (ValueError, ZeroDivisionError):
        print("error")
END
