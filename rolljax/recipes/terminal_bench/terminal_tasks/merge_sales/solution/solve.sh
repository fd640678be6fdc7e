cat > /tmp/report.py <<'END'
import csv

countries = {row["customer_id"]: row["country"] for row in csv.DictReader(open("/work/customers.csv"))}
orders = {row["order_id"]: row for row in csv.DictReader(open("/work/orders.csv"))}
sums = {}
for row in orders.values():
    if row["status"] == "paid":
        total = sums.setdefault(countries.get(row["customer_id"], "unknown"), [0, 0])
        total[0] += 1
        total[1] += int(row["amount_cents"])
with open("/work/report.csv", "w") as f:
    f.write("country,orders,total_cents\n")
    for country, (number, cents) in sorted(sums.items(), key=lambda item: -item[1][1]):
        f.write(f"{country},{number},{cents}\n")
END
python3 /tmp/report.py
