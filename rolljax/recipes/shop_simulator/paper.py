"""What of ShopSimulator is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2601.18225",
    name="ShopSimulator",
    claim="a shop that tells models apart",
    there="38.89/57.33/35.50/34.35 of models",
    here="reference player 1.00, first result .19, random .00; a policy in a small shop with dialogue and personas .85 "
    "to .87, first row .29; without them .65 to .68",
    state="partly",
    seeds=3,
    config="shop_dialogue",
    figure="rolljax/recipes/shop_simulator/shop_dialogue.png",
    why="the goods, personas and the shopper's model are the authors', so no score can be compared",
)
