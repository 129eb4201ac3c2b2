"""select_best.py MODULE CSV GOOD: indices of the configs that are best in a cell or within 1.5 % of it, for `run.py MODULE time`."""
import csv, importlib, json, os, sys
sys.path.insert(0,os.path.dirname(os.path.abspath(__file__)))
from build import name, full
cfgs=importlib.import_module(sys.argv[1]).CFGS; good=set(json.load(open(sys.argv[3]))); idx={name(c):i for i,c in enumerate(cfgs)}
cells={}
for r in csv.DictReader(open(sys.argv[2])):
    if r["contestant"] in idx and not cfgs[idx[r["contestant"]]].get("NOCHK"): cells.setdefault((r["D"],r["causal"],r["length"]),[]).append((float(r["tflops"]),idx[r["contestant"]]))
keep=set()
for c,l in cells.items():
    best=max(x for x,_ in l); keep|={i for x,i in l if x>=best*0.985}
print(",".join(str(i) for i in sorted(keep&good)))
