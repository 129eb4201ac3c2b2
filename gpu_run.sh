T=$(find build/gpu -name op_tests -type f|head -1); L=$(mktemp -d)
python3 - $L <<'E'
import re,sys
t=open('tests/op/table.cpp').read();n=0
for b,ds in(("kDecodeCodes",("dtype=bf16 kv=e4m3 ","dtype=f16 kv=e4m3 ","dtype=bf16 kv=e5m2 ")),("kFp8Hopper",("",))):
  b=re.search(b+r'\[\] = \{(.*?)\};',t,re.S)[1]
  for l in re.findall(r'"([^"]*)"',re.sub(r'"\s+"','',b)):
    for d in ds: open(f"{sys.argv[1]}/{n}.c","w").write(d+l+"\n");n+=1
E
timeout 60 $T --gtest_filter='CudaFp8.*:CudaAppend.*' --gtest_brief=1 >$L/t 2>&1 &
ls $L/*.c|timeout 45 xargs -P 14 -I{} sh -c "timeout 20 $T --cases {} --backend cuda>{}.log 2>&1||(echo BAD \$(cat {});tail -2 {}.log)"
wait;tail -3 $L/t
for a in "128 128,2,4,3,3,2,64" "256 64,2,2,3,2,2,64" "64 128,2,4,4,4,2,64";do set -- $a;timeout 25 python bench/cuda_fp8.py --head-dims $1 --lengths 8192 --tiles $2,1 $2,2 $2,3 --lead-ms 25 --measure-ms 30 --rounds 1;done
timeout 42 python bench/cuda_serving.py --cases codes --only '16|x 2048:|x 1024:' --rounds 2 --seconds 35 --out $L/s
python - <<'E'
import torch,tessera as t
k=torch.randn(1,8192,8,128,device='cuda').bfloat16();P=512
tb=torch.randperm(P,device='cuda').int()[None];u=torch.tensor([8192]).int().cuda();a=torch.rand(8192,64,device='cuda')
for n,d,s in(('bf16',k.dtype,None),('head',torch.float8_e4m3fn,(8,)),('token',torch.float8_e4m3fn,(P,16,8))):
  c=torch.zeros(2,P,16,8,128,device='cuda').to(d);w=[s and torch.ones(s,device="cuda") for _ in "kv"]
  f=lambda:t.append(k,k,c[0],c[1],u,page_table=tb,cos=a,sin=a,k_descale=w[0],v_descale=w[1],compute_scales=n=='token')
  f();g=torch.cuda.CUDAGraph()
  with torch.cuda.graph(g):[f() for _ in range(20)]
  g.replay();x,y=(torch.cuda.Event(enable_timing=True) for _ in'12');x.record();[g.replay() for _ in range(20)];y.record();y.synchronize();print(n,x.elapsed_time(y)*2.5)
E
