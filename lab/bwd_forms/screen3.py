# The third screening: first loads early, stores under products, prefetches into L2
import os
F=dict(D=64,BM=128,VK=4); A=dict(D=128,BM=64); B=dict(D=128,BM=80,SWAP=1,PIPE=2); W=dict(D=64,BM=128,W=1,SRC="head_a_block_first.cu",FUSE=1); W2=dict(D=64,BM=128,W=2,SRC="head_a_block.cu",FUSE=1)
P=dict(PFN=132); G1=dict(F,P16=1,PEEL=1); A1=dict(A,P16=1,PEEL=1); OLD=dict(TAIL=0,EARLY=0,VEX=0)
both=[dict(G1,**OLD),dict(G1,TAIL=1),dict(G1,TAIL=1,**P),dict(G1,**P),dict(F,P16=3,**P),dict(F,P16=3,PEEL=1,**P),dict(F,P16=3,ALT=1,**P),dict(F,P16=3,VEX=0,**P),
W2|dict(P16=2),W2|dict(P16=2)|P,dict(W,P16=3),
dict(A1,**OLD),dict(A1,TAIL=1,**P),dict(A1,**P),dict(A,P16=3,**P),dict(A,P16=3,PEEL=1,**P),dict(A,P16=3,ALT=1,**P),dict(A1,PIPE=3,**P),dict(B,P16=1,**P)]
cau=[dict(W2,P16=2,DIAG=1,**P),dict(G1,DIAG=1,**P),dict(G1,DIAG=1,GMB=4,MAXS=2048,**P),dict(G1,GMB=4,MAXS=2048,**P),dict(F,P16=3,GMB=4,MAXS=2048,**P),dict(F,P16=3,PEEL=1,GMB=4,MAXS=2048,**P),
dict(A1,DIAG=1,**P),dict(A1,DIAG=1,GMB=8,MAXS=2048,**P),dict(A,P16=3,DIAG=1,**P),dict(A,P16=3,DIAG=1,GMB=8,MAXS=2048,**P),dict(A1,GMB=8,MAXS=2048,**P)]
CFGS=both+[dict(c,CAUSAL=1) for c in both+cau]
CELLS=[(D,ca,S) for S in (512,1024,4096) for D in (64,128) for ca in (1,0)]
if os.environ.get("FINAL"): CELLS=[(D,ca,S) for S in (512,1024,16384,2048,4096,8192) for D in (64,128) for ca in (1,0)]
