"""What of DDK is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2407.16154",
    name="DDK",
    claim="more data of the domains in which a student lags",
    there="49.39 to 55.41 on average",
    here="the largest ratio of perplexities is 12 % lower than with equal shares",
    state="partly",
    seeds=3,
    config="ddk",
    figure="rolljax/recipes/ddk/ddk.png",
    why="the other domains pay for it, so that the average is no better",
)
