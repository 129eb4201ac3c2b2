# The second screening: D64 and D128 forms, widths of the sections, and what is left out for diagnosis
F=dict(D=64,BM=128,VK=4); A=dict(D=128,BM=64); B=dict(D=128,BM=80,SWAP=1,PIPE=2); W=dict(D=64,BM=128,W=1,SRC="head_a_block_first.cu",FUSE=1); W2=dict(D=64,BM=128,W=2,SRC="head_a_block.cu",FUSE=1)
G1=dict(F,P16=1,PEEL=1); A1=dict(A,P16=1,PEEL=1)
both=[G1,dict(F,P16=0),dict(F,P16=3),dict(F,P16=3,KK=1),dict(G1,ALT=1),dict(F,P16=3,ALT=1),dict(W,P16=3),dict(W2,P16=2),dict(W2,P16=3),
A1,dict(A,P16=3,PEEL=1),dict(A,P16=3),dict(A1,PIPE=3),dict(A,PIPE=2,P16=1),dict(A,PIPE=2,P16=3),dict(B,P16=1),dict(B,P16=3),dict(B,P16=1,ALT=1),dict(A,P16=1,ALT=1),dict(A1,RED=1),dict(G1,RED=1)]
full=[dict(G1,MAXS=512,PFD=1),dict(G1,MAXS=512,L2P=2),dict(G1,MAXS=512,NODQ=1,NOCHK=1),dict(G1,MAXS=512,NOST=1,NOCHK=1)]
cau=[dict(G1,DIAG=1),dict(A1,DIAG=1),dict(W2,P16=2,DIAG=1)]+[dict(G1,GMB=g,MAXS=4096) for g in (0,2,4,8,16,64)]+[dict(A1,GMB=g,MAXS=4096) for g in (0,4,8,16,64)]
CFGS=both+full+[dict(c,CAUSAL=1) for c in both+full+cau]
CELLS=[(64,1,512),(128,1,512),(64,0,512),(128,0,512),(64,1,1024),(128,1,1024),(64,0,4096),(128,0,16384),(64,1,4096),(128,1,4096)]
import os
if os.environ.get("FINAL"): CELLS=[(D,ca,S) for S in (512,1024,16384,2048,4096,8192) for D in (64,128) for ca in (1,0)]
