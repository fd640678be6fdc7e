cat > /tmp/sudoku.py <<'END'
cells = [c for row in open("/work/grid.txt").read().split() for c in row]


def choices(i):
    y, x = divmod(i, 9)
    near = {cells[y * 9 + k] for k in range(9)} | {cells[k * 9 + x] for k in range(9)}
    near |= {cells[(y // 3 * 3 + k // 3) * 9 + x // 3 * 3 + k % 3] for k in range(9)}
    return [d for d in "123456789" if d not in near]


def solve():
    empty = [i for i in range(81) if cells[i] == "."]
    if not empty:
        return True
    i = min(empty, key=lambda i: len(choices(i)))
    for d in choices(i):
        cells[i] = d
        if solve():
            return True
    cells[i] = "."
    return False


assert solve()
print("\n".join("".join(cells[y * 9 : y * 9 + 9]) for y in range(9)))
END
python3 /tmp/sudoku.py > /work/solved.txt
