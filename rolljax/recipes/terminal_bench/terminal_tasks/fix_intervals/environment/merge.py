"""Joins intervals: reads lines of two whole numbers, start and end, prints the joined ones."""

import sys


def join(intervals):
    joined = []
    for start, end in intervals:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def main():
    intervals = []
    for line in sys.stdin:
        start, end = line.split()
        intervals.append((start, end))
    for start, end in join(intervals):
        print(start, end)


main()
