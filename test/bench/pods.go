package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// podTestbed is a containerd of the bench's own with crust-runc as a runtime handler,
// beside the daemon that hands volumes to it.
type podTestbed struct {
	r      *testbed
	node   *cri.Node
	client runtimev1.RuntimeClient
	serial int
}

// pods measures what a deferred volume and crust-runc cost a pod that starts, and what stats from its sandbox cost.
func pods(r *testbed) {
	r.build("crust-runc", "crust-runc-agent")
	program := r.daemon.Program("crust-runc")
	p := &podTestbed{r: r, node: cri.New(r.t, cri.Options{Handlers: map[string]string{"crust": program}})}
	r.daemon.Containerd = p.node.Socket
	r.daemon.Handlers = "default: crust\ncrust: {enabled: true, programs: [" + program + "]}"
	r.daemon.Start()
	p.client = r.daemon.Runtime()
	p.starts()
	p.plainContainers()
	p.stats()
}

// filesystem makes a device with an ext4.
func (p *podTestbed) filesystem(n int) string {
	disk := p.r.disk(n)
	rig.Mkfs(p.r.t, "ext4", disk)
	return disk
}

// starts compares pods with a volume: published and mounted on the host and bound
// by runc, and published and left to the sandbox.
func (p *podTestbed) starts() {
	disk := p.filesystem(0)
	took := inTurns(max(3, p.r.set.scale(40)), func() time.Duration { return p.hostMounted(disk) }, func() time.Duration {
		pod, v, took := p.deferred(disk)
		p.remove(pod, v)
		return took
	})
	p.r.sheet.tell("publish and start of a pod with runc, its volume mounted on the host, p50", millis(took[0]))
	p.r.sheet.ratio("the same with crust-runc, its volume deferred, p50", "<= 1.05x", took[1], took[0], 1.05)
}

func (p *podTestbed) next(disk string) (*volume, string) {
	p.serial++
	return p.r.volume(p.serial, disk), podName(p.serial)
}

// hostMounted publishes a volume as a plain driver does, and removes the pod again.
func (p *podTestbed) hostMounted(disk string) time.Duration {
	v, uid := p.next(disk)
	target := v.request.GetVolumeTargetPath()
	began := time.Now()
	p.r.must(os.Mkdir(target, 0o750))
	p.r.must(unix.Mount(disk, target, "ext4", unix.MS_NOATIME, ""))
	pod := p.run(uid, "runc", target)
	took := time.Since(began)
	p.r.must(errors.Join(pod.Remove(p.r.ctx), unix.Unmount(target, 0)))
	return took
}

func (p *podTestbed) deferred(disk string) (*cri.Pod, *volume, time.Duration) {
	v, uid := p.next(disk)
	began := time.Now()
	_, err := p.client.RuntimeStageVolume(p.r.ctx, v.request)
	p.r.must(err)
	pod := p.run(uid, "crust", v.request.GetVolumeTargetPath())
	return pod, v, time.Since(began)
}

// remove removes a pod with a deferred volume. Unstaging is repeated, as kubelet does.
func (p *podTestbed) remove(pod *cri.Pod, v *volume) {
	p.r.must(pod.Remove(p.r.ctx))
	check.Retried(p.r.t, "unstage", func() error {
		_, err := p.client.RuntimeUnstageVolume(p.r.ctx, v.unstage)
		return err
	})
}

func (p *podTestbed) run(uid, handler, target string) *cri.Pod {
	pod, err := p.node.RunPod(p.r.ctx, uid, handler, 0)
	p.r.must(err)
	_, err = pod.Run(p.r.ctx, cri.Container{Name: "main", Mounts: []cri.Mount{{Host: target, Container: "/data"}}})
	p.r.must(err)
	return pod
}

// plainContainers compares containers without deferred volumes under both runtimes, in pods that run.
func (p *podTestbed) plainContainers() {
	plain := filepath.Join(p.r.daemon.Dir, "plain")
	p.r.must(os.Mkdir(plain, 0o755)) //nolint:gosec // a directory for containers
	start := func(handler string) func() error {
		pod, err := p.node.RunPod(p.r.ctx, "plain-"+handler, handler, 0)
		p.r.must(err)
		n := 0
		return func() error {
			n++
			_, err := pod.Run(p.r.ctx, cri.Container{
				Name: "c" + strconv.Itoa(n), Script: "exit 0", Mounts: []cri.Mount{{Host: plain, Container: "/data"}},
			})
			return err
		}
	}
	all := p.r.timed(max(3, p.r.set.scale(100)), 1, start("runc"), start("crust"))
	added := median(all[1]) - median(all[0])
	p.r.sheet.tell("create and start of a container without deferred volumes with runc, p50", millis(median(all[0])))
	p.r.sheet.atMost("what crust-runc adds to that", "<= 10 ms", added.Seconds(), 0.010, millis(added))
}

// stats compares stats of a volume in a sandbox of crust-runc, by its socket and by
// its program, with stats of one whose sandbox is an (emulated) shim of Kata.
func (p *podTestbed) stats() {
	pod, crust, _ := p.deferred(p.filesystem(1))
	// A daemon hands volumes that name no handler to one only.
	other := newTestbed(p.r.t, p.r.set, p.r.sheet)
	kata := other.oneVolume()
	shim := other.daemon.Runtime()
	ask := func(client runtimev1.RuntimeClient, v *volume) func() error {
		return func() error { return stats(p.r.ctx, client, v) }
	}
	all := p.r.timed(p.r.set.scale(20), 200, ask(shim, kata), ask(p.client, crust))
	p.r.sheet.tell("stats from a shim of Kata's, p50", micros(median(all[0])))
	p.r.sheet.ratio("stats from crust-runc by its socket, p50", "<= 2x", median(all[1]), median(all[0]), 2)
	// Without the word of a socket the program is run.
	p.r.must(os.Remove(filepath.Join("/run/crust", abi.DirName(crust.request.GetVolumeTargetPath()), abi.SocketName)))
	took := median(p.r.timed(p.r.set.scale(300), 1, ask(p.client, crust))[0])
	p.r.sheet.tell("stats from crust-runc by its program, p50", fmt.Sprintf("%.1fx (%s)", float64(took)/float64(median(all[0])), micros(took)))
	p.remove(pod, crust)
}
