"""A taskset of verifiers 0.4: sums of one digit, scored for the right answer and for a short one; for `tests/e2e/test_verifiers.py`."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int = 0


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.total))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 3)

    @vf.metric
    async def chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(10):
            for b in range(10):
                yield SumTask(SumData(idx=0, prompt=f"{a}+{b}=", total=a + b), self.config.task)


__all__ = ["Sums"]
