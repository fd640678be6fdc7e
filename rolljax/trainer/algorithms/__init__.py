"""One file per algorithm. An algorithm is a frozen dataclass that composes credit and objective; its class defaults are
the paper's settings, and its import path is its name in a gin file."""
