# after ptxas was kept from moving the exponentials behind the wait for dP (BBW)
F=dict(D=64,BM=128,VK=4); A=dict(D=128,BM=64); B=dict(D=128,BM=80,SWAP=1,PIPE=2); W2=dict(D=64,BM=128,W=2,SRC="head_a_block.cu",FUSE=1); P=dict(PFN=132)
F3=dict(F,P16=3,**P); A3=dict(A,P16=3,PEEL=1,**P); G1=dict(F,P16=1,PEEL=1,TAIL=1); g4=dict(GMB=4,MAXS=2048); g8=dict(GMB=8,MAXS=2048)
full=[F3,dict(F3,ALT=1),dict(F3,BBW=0),dict(W2,P16=2),A3,dict(A3,BBW=0),dict(B,P16=3,LAG=0,DQF=1),dict(B,P16=3)]
cau=[F3,dict(G1,DIAG=1,**g4),dict(F,P16=3,PEEL=1,DIAG=1,TAIL=1,**g4),dict(W2,P16=2,DIAG=1),dict(A,P16=3,DIAG=1,**P),dict(A,P16=3,DIAG=1,**g8,**P),dict(A,P16=1,DIAG=1,TAIL=1),dict(A,P16=1,DIAG=1,TAIL=1,**g8),dict(A,PIPE=2,P16=3,LAG=0,DQF=1)]
CFGS=full+[dict(c,CAUSAL=1) for c in cau]
CELLS=[(64,1,512),(64,0,512),(128,1,512),(128,0,512),(64,1,1024),(64,0,1024),(128,1,1024),(128,0,1024),(64,0,16384),(64,1,16384),(128,0,16384),(128,1,16384),(64,0,4096),(128,0,4096),(64,1,2048),(128,1,2048),(128,0,2048)]
