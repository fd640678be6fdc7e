"""ShopSimulator (arXiv 2601.18225) and WebShop (arXiv 2207.01206): a web shop, and a simulated shopper who reveals the
wish only when asked."""

ENVIRONMENTS = {"shop": "rolljax.recipes.shop_simulator.shop.Shop"}
