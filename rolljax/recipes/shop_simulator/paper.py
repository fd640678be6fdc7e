"""What of ShopSimulator is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2601.18225",
    name="ShopSimulator",
    claim="a shop that tells models apart",
    there="38.89/57.33/35.50/34.35 of models",
    here="reference player 1.00, first result .19, random .00; in a small shop a policy .65 to .68, first row .30",
    state="partly",
    seeds=3,
    config="shop",
    figure="rolljax/recipes/shop_simulator/shop.png",
    why="the goods, personas and the shopper's model are the authors', so no score can be compared",
)
