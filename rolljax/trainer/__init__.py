"""The trainer room: mesh, credit, objectives, algorithms, packing, the update, publishing weights."""
