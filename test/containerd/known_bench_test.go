//go:build system

package containerd

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// BenchmarkSandboxKnown tells how soon each source knows that a sandbox came and
// that it was killed, beside how long kubelet waits for RunPodSandbox. All times
// are medians, from the beginning of the call and from the kill.
func BenchmarkSandboxKnown(b *testing.B) {
	for name := range sources {
		b.Run(name, func(b *testing.B) { benchKnown(b, name) })
	}
}

func benchKnown(b *testing.B, name string) {
	node := newNode(b, nil)
	tracker, told := runSource(b, name, node)
	check.Eventually(b, "ready", tracker.Ready)
	time.Sleep(2 * time.Second) // the first listing has been repeated
	var run, known, gone []time.Duration
	for b.Loop() {
		begin := time.Now()
		pod, err := node.RunPod(b.Context(), "pod-1", "", 0)
		check.Must(b, err)
		run = append(run, time.Since(begin))
		check.Eventually(b, "it is known", func() bool { _, there := told.of(told.added, pod.ID); return there })
		at, _ := told.of(told.added, pod.ID)
		known = append(known, at.Sub(begin))
		pid, err := pod.Pid(b.Context())
		check.Must(b, err)
		killed := time.Now()
		check.Must(b, syscall.Kill(pid, syscall.SIGKILL))
		check.Eventually(b, "its death is known", told.wasGone(pod.ID))
		at, _ = told.of(told.gone, pod.ID)
		gone = append(gone, at.Sub(killed))
		check.Must(b, pod.Remove(b.Context()))
	}
	b.ReportMetric(median(run), "run-ms")
	b.ReportMetric(median(known), "known-ms")
	b.ReportMetric(median(gone), "gone-ms")
	b.ReportMetric(0, "ns/op")
}

func median(of []time.Duration) float64 {
	slices.Sort(of)
	return float64(of[len(of)/2].Microseconds()) / 1000
}
