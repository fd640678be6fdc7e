cat > /tmp/search.py <<'END'
from collections import deque

maze = open("/work/maze.txt").read().split()
start = next((y, row.index("S")) for y, row in enumerate(maze) if "S" in row)
routes, todo = {start: ""}, deque([start])
while todo:
    y, x = todo.popleft()
    if maze[y][x] == "E":
        print(routes[y, x])
        break
    for letter, dy, dx in (("U", -1, 0), ("D", 1, 0), ("L", 0, -1), ("R", 0, 1)):
        cell = y + dy, x + dx
        if maze[cell[0]][cell[1]] != "#" and cell not in routes:
            routes[cell] = routes[y, x] + letter
            todo.append(cell)
END
python3 /tmp/search.py > /work/route.txt
