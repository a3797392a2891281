package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// podTestbed is a containerd of the bench's own with crust-runc as a runtime handler,
// beside the daemon that hands volumes to it.
type podTestbed struct {
	*testbed
	node   *cri.Node
	client runtimev1.RuntimeClient
	serial int
}

// pods measures what a deferred volume and crust-runc cost a pod that starts, and
// what stats from its sandbox cost.
func pods(ctx context.Context, set settings, r *testbed, s *sheet) (err error) {
	p, done, err := newPodTestbed(r)
	if err != nil {
		return errors.Join(err, done())
	}
	defer func() { err = errors.Join(err, done()) }()
	if err := p.starts(ctx, set, s); err != nil {
		return fmt.Errorf("start of pods: %w", err)
	}
	if err := p.plainContainers(ctx, set, s); err != nil {
		return fmt.Errorf("containers without volumes: %w", err)
	}
	return p.stats(ctx, set, s)
}

func newPodTestbed(r *testbed) (*podTestbed, func() error, error) {
	none := func() error { return nil }
	program := filepath.Join(r.dir, "crust-runc")
	if err := rig.BuildRelease(r.dir, "crust-runc", "crust-runc-agent"); err != nil {
		return nil, none, err
	}
	node, err := cri.New(cri.Options{Handlers: map[string]string{"crust": program}})
	if node == nil {
		return nil, none, err
	}
	if err != nil {
		return nil, node.Close, err
	}
	r.containerd, r.crustRunc = node.Socket, program
	if _, err := r.start(); err != nil {
		return nil, node.Close, err
	}
	client, closeClient, err := r.client()
	if err != nil {
		return nil, node.Close, err
	}
	return &podTestbed{testbed: r, node: node, client: client}, func() error { closeClient(); return node.Close() }, nil
}

// filesystem makes a device with an ext4.
func (p *podTestbed) filesystem(n int) (string, error) {
	disk, err := p.disk(n)
	if err != nil {
		return "", err
	}
	out, err := exec.Command("mkfs.ext4", "-q", disk).CombinedOutput() //nolint:gosec // a device of ours
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	return disk, nil
}

// starts compares pods with a volume: published and mounted on the host and bound
// by runc, and published and left to the sandbox. They take turns.
func (p *podTestbed) starts(ctx context.Context, set settings, s *sheet) error {
	disk, err := p.filesystem(0)
	if err != nil {
		return err
	}
	var all [2]durations
	for range max(3, set.scale(40)) {
		for i, start := range []func(context.Context, string) (*cri.Pod, func() error, time.Duration, error){p.hostMounted, p.deferred} {
			pod, undo, took, err := start(ctx, disk)
			if err != nil {
				return err
			}
			if err := errors.Join(pod.Remove(ctx), undo()); err != nil {
				return err
			}
			all[i] = append(all[i], took)
		}
	}
	s.tell("publish and start of a pod with runc, its volume mounted on the host, p50", millis(all[0].median()))
	s.ratio("the same with crust-runc, its volume deferred, p50", "<= 1.15x", all[1].median(), all[0].median(), 1.15)
	return nil
}

func (p *podTestbed) next(disk string) (*runtimev1.RuntimeStageVolumeRequest, string, error) {
	p.serial++
	request, err := p.request(p.serial, disk)
	return request, "pod-" + strconv.Itoa(p.serial), err
}

// hostMounted publishes a volume as a plain driver does.
func (p *podTestbed) hostMounted(ctx context.Context, disk string) (*cri.Pod, func() error, time.Duration, error) {
	request, uid, err := p.next(disk)
	if err != nil {
		return nil, nil, 0, err
	}
	target := request.GetVolumeTargetPath()
	began := time.Now()
	if err := os.Mkdir(target, 0o750); err != nil {
		return nil, nil, 0, err
	}
	if err := unix.Mount(disk, target, "ext4", unix.MS_NOATIME, ""); err != nil {
		return nil, nil, 0, err
	}
	pod, err := p.run(ctx, uid, "runc", target)
	return pod, func() error { return unix.Unmount(target, 0) }, time.Since(began), err
}

func (p *podTestbed) deferred(ctx context.Context, disk string) (*cri.Pod, func() error, time.Duration, error) {
	request, uid, err := p.next(disk)
	if err != nil {
		return nil, nil, 0, err
	}
	began := time.Now()
	if _, err := p.client.RuntimeStageVolume(ctx, request); err != nil {
		return nil, nil, 0, err
	}
	pod, err := p.run(ctx, uid, "crust", request.GetVolumeTargetPath())
	took := time.Since(began)
	return pod, func() error { return p.unstage(ctx, request.GetVolumeTargetPath()) }, took, err
}

// unstage repeats while it is told to, as kubelet does.
func (p *podTestbed) unstage(ctx context.Context, target string) error {
	var err error
	for range 500 {
		if _, err = p.client.RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target}); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

func (p *podTestbed) run(ctx context.Context, uid, handler, target string) (*cri.Pod, error) {
	pod, err := p.node.RunPod(ctx, uid, handler, 0)
	if err != nil {
		return nil, err
	}
	_, err = pod.Run(ctx, cri.Container{Name: "main", Mounts: []cri.Mount{{Host: target, Container: "/data"}}})
	return pod, err
}

// plainContainers compares containers without deferred volumes under both
// runtimes, in pods that run.
func (p *podTestbed) plainContainers(ctx context.Context, set settings, s *sheet) error {
	var running [2]*cri.Pod
	for i, handler := range []string{"runc", "crust"} {
		pod, err := p.node.RunPod(ctx, "plain-"+handler, handler, 0)
		if err != nil {
			return err
		}
		running[i] = pod
	}
	plain := filepath.Join(p.dir, "plain")
	if err := os.Mkdir(plain, 0o755); err != nil { //nolint:gosec // a directory for containers
		return err
	}
	var all [2]durations
	for n := range max(3, set.scale(100)) {
		for i, pod := range running {
			took, err := timed(1, func() error {
				_, err := pod.Run(ctx, cri.Container{
					Name: "c" + strconv.Itoa(n), Script: "exit 0", Mounts: []cri.Mount{{Host: plain, Container: "/data"}},
				})
				return err
			})
			if err != nil {
				return err
			}
			all[i] = append(all[i], took...)
		}
	}
	added := all[1].median() - all[0].median()
	s.tell("create and start of a container without deferred volumes with runc, p50", millis(all[0].median()))
	s.atMost("what crust-runc adds to that", "<= 10 ms", added.Seconds(), 0.010, millis(added))
	return errors.Join(running[0].Remove(ctx), running[1].Remove(ctx))
}

// stats compares stats of a volume in a sandbox of crust-runc, by its socket and by
// its program, with stats of one whose sandbox is an (emulated) shim of Kata.
func (p *podTestbed) stats(ctx context.Context, set settings, s *sheet) error {
	disk, err := p.filesystem(1)
	if err != nil {
		return err
	}
	pod, undo, _, err := p.deferred(ctx, disk)
	if err != nil {
		return err
	}
	target, err := p.target(p.serial)
	if err != nil {
		return err
	}
	// A daemon hands volumes that name no handler to one only.
	other, err := newTestbed(false)
	if other != nil {
		defer other.close()
	}
	if err != nil {
		return err
	}
	kata, err := other.oneVolume(ctx)
	if err != nil {
		return err
	}
	kataClient, closeClient, err := other.client()
	if err != nil {
		return err
	}
	defer closeClient()
	crust := &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target}
	var all [2]durations
	for range set.scale(20) {
		for i, call := range []func() error{
			func() error { _, err := kataClient.RuntimeGetVolumeStats(ctx, kata.stats); return err },
			func() error { _, err := p.client.RuntimeGetVolumeStats(ctx, crust); return err },
		} {
			took, err := timed(200, call)
			if err != nil {
				return err
			}
			all[i] = append(all[i], took...)
		}
	}
	s.tell("stats from a shim of Kata's, p50", micros(all[0].median()))
	s.ratio("stats from crust-runc by its socket, p50", "<= 2x", all[1].median(), all[0].median(), 2)
	// Without the word of a socket the program is run.
	if err := os.Remove(filepath.Join("/run/crust", abi.DirName(target), abi.SocketName)); err != nil {
		return err
	}
	took, err := timed(set.scale(300), func() error { _, err := p.client.RuntimeGetVolumeStats(ctx, crust); return err })
	if err != nil {
		return err
	}
	s.tell("stats from crust-runc by its program, p50", fmt.Sprintf("%.1fx (%s)",
		float64(took.median())/float64(all[0].median()), micros(took.median())))
	return errors.Join(pod.Remove(ctx), undo())
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}
