"""run.py MODULE: checks every config of MODULE.CFGS beside cuDNN, the library and FlashAttention-4 against float64, then times them together in the steady state.
MODULE.CELLS: (D, causal, length) or none. Environment: LIMIT seconds in all, LEAD, MS milliseconds, ROUNDS, OUT, FA4=1, LIB=folder of libraries."""
import csv, ctypes, importlib, json, math, os, select, subprocess, sys, threading, time
HERE=os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0,HERE)
from build import name, smem, full, code
OUT=os.environ.get("OUT","/tmp"); END=float(os.environ.get("END",time.time()+float(os.environ.get("LIMIT","400")))); os.environ["END"]=str(END)
def parent():
    cfgs=importlib.import_module(sys.argv[1]).CFGS; todo=list(range(len(cfgs))); good=[]; first="1"
    while todo and time.time()<END:
        p=subprocess.Popen([sys.executable,"-u",__file__,sys.argv[1],"check",",".join(map(str,todo)),first],stdout=subprocess.PIPE,stderr=subprocess.STDOUT,text=True,bufsize=1)
        cur=None; os.set_blocking(p.stdout.fileno(),False); buf=""; last=time.time(); first="0"
        while True:
            r,_,_=select.select([p.stdout],[],[],1.0)
            if r:
                x=p.stdout.read()
                if x: buf+=x; last=time.time()
                elif p.poll() is not None: break
            while "\n" in buf:
                line,buf=buf.split("\n",1)
                if line.startswith("START"): cur=int(line.split()[1]); todo.remove(cur)
                else: print(line,flush=True)
                if line.startswith("CHK") and " OK " in line: good.append(cur)
            if time.time()-last>(6 if cur is not None else 60) or time.time()>END:
                print("HANG, killing at",cur,name(cfgs[cur]) if cur is not None else "",flush=True); p.kill(); p.wait(); break
        if cur is None: break
    open(os.path.join(OUT,sys.argv[1]+"-good.json"),"w").write(json.dumps(good))
    try: subprocess.run([sys.executable,'-u',__file__,sys.argv[1],'time',','.join(map(str,good))],timeout=max(20,END-time.time()))
    except subprocess.TimeoutExpired: print("time phase cut")
class Energy(threading.Thread):
    def __init__(s):
        super().__init__(daemon=True)
        import pynvml as n
        n.nvmlInit(); s.n=n; s.h=n.nvmlDeviceGetHandleByIndex(0); s.log=[]; s.clock=[]; s.start()
    def run(s):
        i=0; last=None
        while True:
            e=s.n.nvmlDeviceGetTotalEnergyConsumption(s.h); t=time.time()
            if e!=last: s.log.append((t,e)); last=e
            if i%4==0: s.clock.append((time.time(),s.n.nvmlDeviceGetClockInfo(s.h,s.n.NVML_CLOCK_SM)))
            i+=1; time.sleep(0.004)
    def at(s,t):
        l=s.log
        for i in range(len(l)-1,0,-1):
            if l[i-1][0]<=t: (a,x),(b,y)=l[i-1],l[i]; return x+(y-x)*(t-a)/(b-a)
        return float("nan")
    def mhz(s,a,b):
        c=[x for t,x in s.clock if a<=t<=b]; return sum(c)/max(1,len(c))
def child():
    import torch, torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel, SDPBackend
    mod=importlib.import_module(sys.argv[1]); cfgs=mod.CFGS; todo=[int(x) for x in sys.argv[3].split(",") if x]
    dev=torch.device("cuda"); torch.zeros(1,device=dev); cu=ctypes.CDLL("libcuda.so.1")
    def ck(r):
        if r: raise RuntimeError(f"cu error {r}")
    clk=torch.zeros(int(os.environ.get("CLK","8")),dtype=torch.int64,device=dev); ctr=torch.zeros(1<<20,dtype=torch.int32,device=dev)
    def tmap(t,rows,l2p=3):
        B,S,H,D=t.shape; raw=ctypes.create_string_buffer(192); a=(ctypes.addressof(raw)+63)//64*64
        dims=(ctypes.c_uint64*5)(64,S,D//64,H,B); st=(ctypes.c_uint64*4)(t.stride(1)*2,128,t.stride(2)*2,t.stride(0)*2)
        box=(ctypes.c_uint32*5)(64,rows,D//64,1,1); es=(ctypes.c_uint32*5)(1,1,1,1,1)
        ck(cu.cuTensorMapEncodeTiled(ctypes.c_void_p(a),9,5,ctypes.c_void_p(t.data_ptr()),dims,st,box,es,0,3,l2p,0)); return raw,a
    class K:
        def __init__(s,cfg):
            s.cfg=full(cfg); data=open(os.path.join(HERE,"cubin",name(code(cfg))+".cubin"),"rb").read(); m=ctypes.c_void_p(); ck(cu.cuModuleLoadData(ctypes.byref(m),data)); s.f={}
            for n in (b"bwd",b"pre",b"post"):
                f=ctypes.c_void_p(); ck(cu.cuModuleGetFunction(ctypes.byref(f),m,n)); s.f[n]=f
            s.sm=smem(cfg); ck(cu.cuFuncSetAttribute(s.f[b"bwd"],8,s.sm)); s.m=m
        def prep(s,q,k,v,o,do,lse,dq,dk,dv):
            """The call, and its products alone. CH chunks of the batch one after the other, each with the same accumulator of dQ, so that it stays in L2; in ST streams by turns; as a CUDA graph."""
            c=s.cfg; ch=min(c.get("CH",0),q.shape[0])
            if not ch: return s.prep1(q,k,v,o,do,lse,dq,dk,dv)
            n=c.get("ST",1); streams=[torch.cuda.Stream() for _ in range(n)]; per=-(-q.shape[0]//ch); ws=[None]*n; calls=[]
            torch.cuda.synchronize()
            for i,b0 in enumerate(range(0,q.shape[0],per)):
                with torch.cuda.stream(streams[i%n]):
                    calls.append((i%n,s.prep1(*[t[b0:b0+per] for t in (q,k,v,o,do,lse,dq,dk,dv)],ws[i%n])[0]))
                ws[i%n]=ws[i%n] if ws[i%n] is not None else s.ws
            g=torch.cuda.CUDAGraph()
            for _,f in calls: f()
            torch.cuda.synchronize()
            with torch.cuda.graph(g,stream=streams[0]):
                for x in streams[1:]: x.wait_stream(streams[0])
                for _,f in calls: f()
                for x in streams[1:]: streams[0].wait_stream(x)
            keep=(calls,ws,streams)
            return (lambda keep=keep: g.replay()),None
        def prep1(s,q,k,v,o,do,lse,dq,dk,dv,ws=None):
            B,S,H,D=q.shape; c=s.cfg; BM=c["BM"]; num_m=-(-S//BM); num_n=-(-S//128); Sp=num_m*BM; BH=B*H; W=c.get("W")
            ws=torch.empty(BH*Sp*(2 if W else D+2),device=dev) if ws is None else ws; s.ws=ws; l2=ws[:BH*Sp]; de=ws[BH*Sp:2*BH*Sp]; dqa=ws[2*BH*Sp:]
            l2p=c.get("L2P",3); maps=[tmap(q,BM,l2p),tmap(k,128,l2p),tmap(v,128,l2p),tmap(do,BM,l2p)]
            P=lambda t: ctypes.c_void_p(t.data_ptr()); I=ctypes.c_int; Fl=ctypes.c_float; G=max(1,min(BH,c.get("GMB",32)*(1<<20)//(S*D*8))); sc=D**-0.5
            def mk(vals): return (ctypes.c_void_p*len(vals))(*[ctypes.addressof(x) if not isinstance(x,int) else x for x in vals]),vals
            rows=B*Sp*H; st=ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            a1=mk([P(o),P(do),P(lse),P(l2),P(de),P(dqa),I(S),I(Sp),I(H),I(rows)])
            a2=mk([m[1] for m in maps]+[P(l2),P(de),P(dqa),P(dk),P(dv),I(S),I(H),I(BH),I(num_n),I(num_m),I(G),Fl(sc*1.4426950408889634),Fl(sc),P(clk),P(dq),P(ctr),I(0)])
            a3=mk([P(dqa),P(dq),I(S),I(H),I(num_m),Fl(sc)]); g1=(rows*(D//8)+255)//256; g2=BH if W else num_n*BH; g3=BH*num_m; f=s.f
            dqwg=c.get("DQWG",0); keep=(maps,ws,a1,a2,a3)
            def L(fn,g,t,sm,a):
                r=cu.cuLaunchKernel(fn,g,1,1,t,1,1,sm,st,a[0],None)
                if r: raise RuntimeError(f"launch {r}")
            def go(keep=keep):
                L(f[b"pre"],g1,256,0,a1); L(f[b"bwd"],g2,384+128*dqwg,s.sm,a2)
                if not W: L(f[b"post"],g3,128 if dqwg else 256,0,a3)
            return go,(lambda: L(f[b"bwd"],g2,384+128*dqwg,s.sm,a2))
    libs={}
    if os.environ.get("LIB"):
        sys.path.insert(0,os.path.join(HERE,"../bwd_sm90")); from harness import Variant
        for n in sorted(os.listdir(os.environ["LIB"])):
            if n.endswith(".so"): v=Variant(os.environ["LIB"],n[:-3]); libs.setdefault(v.d,[]).append(v)
    def lib_call(v,q,k,v_,o,do,lse,ca,outs):
        t=dict(q=q,k=k,v=v_,o=o,d_o=do,lse=lse,d_q=outs[0],d_k=outs[1],d_v=outs[2]); return v.bind(torch,t,ca,pdl=0)
    fa4=None
    if os.environ.get("FA4"):
        try: from flash_attn.cute import flash_attn_func as fa4
        except Exception as e: print("no FlashAttention-4:",repr(e)[:300])
    def fa4_call(q,k,v,do,ca):
        a=[t.detach().requires_grad_() for t in (q,k,v)]; o=fa4(*a,causal=bool(ca)); o=o[0] if isinstance(o,tuple) else o
        return lambda: torch.autograd.grad(o,a,do,retain_graph=True)
    def cudnn_call(q,k,v,do,ca):
        a=[t.transpose(1,2).detach().requires_grad_() for t in (q,k,v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): o=F.scaled_dot_product_attention(*a,is_causal=bool(ca))
        d=do.transpose(1,2); return o,(lambda: torch.autograd.grad(o,a,d,retain_graph=True))
    def ref(q,k,v,do,ca):
        qf,kf,vf=[t.double().transpose(1,2).requires_grad_() for t in (q,k,v)]; S=q.shape[1]; s=qf@kf.transpose(2,3)*q.shape[3]**-0.5
        if ca: s=s.masked_fill(torch.ones(S,S,device=dev,dtype=torch.bool).triu(1),float("-inf"))
        lse=s.logsumexp(-1); o=s.softmax(-1)@vf; g=torch.autograd.grad(o,(qf,kf,vf),do.double().transpose(1,2))
        return o.detach().transpose(1,2).to(torch.bfloat16).contiguous(),lse.detach().float().contiguous(),[x.transpose(1,2) for x in g]
    def err(out,g): return [((x.double()-y).norm()/y.norm()).item() for x,y in zip(out,g)]
    show=lambda e: "/".join(f"{x*1e3:.2f}" for x in e)
    torch.manual_seed(int(time.time()))
    if sys.argv[2]=="check":
        cache={}
        def inputs(c,D,ca):
            if (c,D,ca) not in cache:
                B,S,H,amp=c; q,k,v,do=[torch.randn(B,S,H,D,device=dev,dtype=torch.bfloat16) for _ in range(4)]; q*=amp
                cache[c,D,ca]=(q,k,v,do,ref(q,k,v,do,ca))
            return cache[c,D,ca]
        CASES=((3,512,4,1),(2,1000,3,1),(1,130,3,1),(2,384,5,3),(1,2048,8,1)); WCASES=((3,512,4,1),(2,500,3,1),(1,130,3,1),(2,384,5,3),(64,512,8,1))
        if sys.argv[4]=="1":
            for D in sorted({full(c)["D"] for c in cfgs}):
                for ca in (0,1):
                    for c in ((3,512,4,1),(1,2048,8,1)):
                        q,k,v,do,(o,lse,g)=inputs(c,D,ca); row=["cudnn "+show(err([x.transpose(1,2) for x in cudnn_call(q,k,v,do,ca)[1]()],g))]
                        for l in libs.get(D,[]):
                            outs=[torch.full_like(q,float("nan")) for _ in range(3)]; lib_call(l,q,k,v,o,do,lse,ca,outs)(); torch.cuda.synchronize(); row.append(l.name+" "+show(err(outs,g)))
                        if fa4:
                            try: row.append("fa4 "+show(err(fa4_call(q,k,v,do,ca)(),g)))
                            except Exception as e: row.append("fa4 "+repr(e)[:100])
                        print(f"ERR D{D} causal{ca} S{c[1]} "+" | ".join(row),flush=True)
        for i in todo:
            c=full(cfgs[i]); D=c["D"]; ca=c["CAUSAL"]; print("START",i,flush=True)
            first=next(j for j in range(len(cfgs)) if name(code(cfgs[j]))==name(code(cfgs[i])))
            if first<i and not c.get("CH"): print("CHK  OK  as",first); continue
            try:
                kn=K(cfgs[i]); errs=[]; ok=True
                for case in (WCASES if c.get("W") else CASES):
                    q,k,v,do,(o,lse,g)=inputs(case,D,ca); out=[torch.full_like(q,float("nan")) for _ in range(3)]
                    go,_=kn.prep(q,k,v,o,do,lse,*out); go(); torch.cuda.synchronize(); e=err(out,g); errs.append(show(e)); ok&=all(x<4e-3 for x in e)
                    go(); torch.cuda.synchronize(); e2=err(out,g); ok&=all(abs(a-b)<1e-5 for a,b in zip(e,e2))
                ok|=bool(c.get("NOCHK"))
                print(f"CHK {'OK ' if ok else 'BAD'} {name(cfgs[i])} dq/dk/dv e-3 "+" ".join(errs),flush=True)
            except Exception as e:
                print("EXC",name(cfgs[i]),repr(e)[:300],flush=True)
                if "cu error" not in str(e): raise
        return
    if sys.argv[2]=="trace":
        import numpy as np
        S=512
        for i in range(len(cfgs)):
            c=full(cfgs[i]); D=c["D"]; ca=c["CAUSAL"]; H=2048//D; B=16384//S; q,k,v,do=[torch.randn(B,S,H,D,device=dev,dtype=torch.bfloat16) for _ in range(4)]
            o0,f=cudnn_call(q,k,v,do,ca); o=o0.detach().transpose(1,2).contiguous(); qt,kt,vt=[t.transpose(1,2) for t in (q,k,v)]
            lse=torch.ops.aten._scaled_dot_product_cudnn_attention(qt,kt,vt,None,True,0.0,bool(ca),False)[1].float().reshape(B,H,S).contiguous()
            outs=[torch.empty_like(q) for _ in range(3)]; go,_=K(cfgs[i]).prep(q,k,v,o,do,lse,*outs)
            for _ in range(300): go()
            torch.cuda.synchronize(); n=B*H*4; x=clk[:n*40].cpu().numpy().reshape(n,40); np.save(os.path.join(OUT,f"trace{i}.npy"),(x-x[:,:1].min()).astype(np.int32))
            d=(x[:,:39]-x[:,:1]); sm={}; t=np.arange(n)
            for b in range(n): sm.setdefault(int(x[b,39]),[]).append((int(x[b,0]),int(x[b,37])))
            gaps=[]
            for l in sm.values(): l.sort(); gaps+=[l[j+1][0]-l[j][1] for j in range(len(l)-1)]
            gaps=np.array(gaps); print(name(cfgs[i]),"gap exit to entry: median",np.median(gaps),"mean",gaps.mean(),"block mean",d[:,37].mean())
            G=max(1,min(B*H,c.get("GMB",32)*(1<<20)//(S*D*8))) if ca else 1; per=4*G; g=t//per; rr=t-g*per; Gl=np.minimum(G,B*H-g*G); nn=rr//Gl
            for m in range(4):
                w=d[nn==m]; steps=min(4,(4-m)*128//c["BM"]) if ca else min(4,512//c["BM"])
                print(" n",m,"blocks",len(w)," ".join(f"{p}:{int(np.median(w[:,p]))}" for p in range(1,38) if p<5 or p>=34 or p<5+7*steps),flush=True)
                if not ca: break
        return
    LEAD=float(os.environ.get("LEAD","200")); MS=float(os.environ.get("MS","200")); R=int(os.environ.get("ROUNDS","2")); en=Energy()
    def timed(f,est):
        for _ in range(max(1,int(LEAD/est))): f()
        n=max(2,int(MS/est)); a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True); torch.cuda.synchronize(); t0=time.time()
        a.record()
        for _ in range(n): f()
        b.record(); b.synchronize(); t1=time.time(); return a.elapsed_time(b)/n,(t0,t1,n)
    out=open(os.path.join(OUT,sys.argv[1]+".csv"),"w",newline=""); wr=csv.writer(out); wr.writerow("device,D,causal,length,contestant,tflops,ms,ms_rounds,joules,watts,mhz".split(","))
    devname=torch.cuda.get_device_name(0); table=[]; kern={}
    for D,ca,S in mod.CELLS:
        if time.time()>END-15: print("no time for",D,ca,S); break
        H=2048//D; B=max(1,16384//S); fl=10*B*S*2048*S/(2 if ca else 1); q,k,v,do=[torch.randn(B,S,H,D,device=dev,dtype=torch.bfloat16) for _ in range(4)]
        o0,f=cudnn_call(q,k,v,do,ca); fns=[("cudnn",f)]; o=o0.detach().transpose(1,2).contiguous(); qt,kt,vt=[t.transpose(1,2) for t in (q,k,v)]
        lse=torch.ops.aten._scaled_dot_product_cudnn_attention(qt,kt,vt,None,True,0.0,bool(ca),False)[1].float().reshape(B,H,S).contiguous()
        outs=[torch.empty_like(q) for _ in range(3)]
        if fa4:
            try: f=fa4_call(q,k,v,do,ca); f(); fns.append(("fa4",f))
            except Exception as e: print("fa4",repr(e)[:200])
        for l in libs.get(D,[]): fns.append((l.name,lib_call(l,q,k,v,o,do,lse,ca,outs)))
        for i in todo:
            c=full(cfgs[i])
            if c["D"]!=D or c["CAUSAL"]!=ca or (c.get("W") and S>512) or (c.get("MAXS",1<<30)<S): continue
            if i not in kern: kern[i]=K(cfgs[i])
            g=kern[i].prep(q,k,v,o,do,lse,*outs); fns.append((name(cfgs[i]),g[0]))
            if os.environ.get("PARTS") and g[1] and S<=512 and (c.get("MAXS") or c.get("W") or (c.get("PEEL") and not any(c.get(x) for x in ("ALT","RED","DIAG")))): fns.append((name(cfgs[i])+" main",g[1]))
        est={}
        for x,f in fns:
            f(); f(); torch.cuda.synchronize(); a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True); a.record(); f(); f(); f(); b.record(); b.synchronize(); est[x]=a.elapsed_time(b)/3
        t={x:[] for x,_ in fns}; w={x:[] for x,_ in fns}
        for r in range(R):
            for x,f in (fns if r%2==0 else fns[::-1]): m,win=timed(f,est[x]); t[x].append(m); w[x].append(win)
        time.sleep(0.15); rates={}
        for x,_ in fns:
            ms=sum(t[x])/len(t[x]); p=[(en.at(b)-en.at(a))/1e3/(b-a) for a,b,_ in w[x]]; watts=sum(p)/len(p); mhz=sum(en.mhz(a,b) for a,b,_ in w[x])/len(p)
            rates[x]=fl/ms/1e9; wr.writerow([devname,D,ca,S,x,f"{rates[x]:.1f}",f"{ms:.4f}"," ".join(f"{y:.4f}" for y in t[x]),f"{watts*ms/1e3:.4f}",f"{watts:.0f}",f"{mhz:.0f}"])
            table.append((D,ca,S,x,rates[x],watts*ms/1e3,mhz))
        out.flush()
        print(f"-- D{D} causal{ca} {S}: "+" ".join(f"{x[-26:]} {rates[x]:.0f}" for x,_ in fns),flush=True)
        del fns,outs,o,o0
    for D,ca in sorted({(r[0],r[1]) for r in table}):
        ss=sorted({r[2] for r in table if r[:2]==(D,ca)}); print(f"== {devname} D{D} causal{ca}: TFLOP/s at {ss} | J a call | MHz at the longest")
        names=[]; [names.append(r[3]) for r in table if r[:2]==(D,ca) and r[3] not in names]
        for x in names:
            g={r[2]:r for r in table if r[:2]==(D,ca) and r[3]==x}
            print(f"{x:52s} "+" ".join(f"{g[s][4]:6.1f}" if s in g else "     -" for s in ss)+" | "+" ".join(f"{g[s][5]:.3f}" if s in g else "-" for s in ss)+f" | {g[max(g)][6]:.0f}",flush=True)
if len(sys.argv)>2 and sys.argv[2] in("check","time","trace"): child()
else: parent()
