"""ShopSimulator (arXiv 2601.18225) and WebShop (arXiv 2207.01206): a web shop with a shopper who must be asked."""

ENVIRONMENTS = {"shop": "rolljax.recipes.shop_simulator.shop.Shop"}
