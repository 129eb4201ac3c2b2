# The fourth screening (chunks of the batch), and with FINAL=1 the grid
import os
F=dict(D=64,BM=128,VK=4); A=dict(D=128,BM=64); B=dict(D=128,BM=80,SWAP=1,PIPE=2); W=dict(D=64,BM=128,W=1,SRC="head_a_block_first.cu",FUSE=1); W2=dict(D=64,BM=128,W=2,SRC="head_a_block.cu",FUSE=1)
P=dict(PFN=132); G1=dict(F,P16=1,PEEL=1,TAIL=1); F3=dict(F,P16=3,**P); A3=dict(A,P16=3,PEEL=1,**P); M=dict(MAXS=2048)
ways=lambda c: [dict(c,CH=8,ST=1,**M),dict(c,CH=8,ST=2,**M),dict(c,CH=4,ST=2,**M)]
full=[G1,F3,dict(F3,ALT=1),dict(W,P16=3),dict(W2,P16=2),*ways(G1),*ways(dict(W2,P16=2))[1:],A3,dict(A,P16=1,PEEL=1,TAIL=1),dict(B,P16=1,**P),*ways(A3)]
g4=dict(GMB=4,**M); g8=dict(GMB=8,**M); GD=dict(G1,DIAG=1); F3P=dict(F3,PEEL=1); A3D=dict(A,P16=3,DIAG=1,**P)
cau=[G1,F3,dict(F3P,**g4),dict(GD,**g4),dict(W,P16=3),dict(W2,P16=2,DIAG=1),*ways(dict(GD,GMB=4)),dict(F3P,GMB=4,CH=8,ST=2,**M),*ways(dict(W2,P16=2,DIAG=1))[1:],
A3D,dict(A3D,**g8),dict(A,P16=1,PEEL=1,TAIL=1),dict(A,P16=1,DIAG=1,TAIL=1),*ways(dict(A3D,GMB=8))]
CFGS=full+[dict(c,CAUSAL=1) for c in cau]
CELLS=[(D,ca,S) for S in (512,1024) for D in (64,128) for ca in (1,0)]+[(64,1,2048),(128,0,2048),(64,0,4096),(128,1,4096)]
if os.environ.get("FINAL"): CELLS=[(D,ca,S) for S in (512,1024,16384,2048,4096,8192) for D in (64,128) for ca in (1,0)]
