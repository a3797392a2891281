package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

const manyRecords = 10000

// scale measures start and memory with no volume and with 10,000.
func scale(ctx context.Context, set settings, r *testbed, s *sheet) error {
	if _, err := r.start(); err != nil {
		return err
	}
	time.Sleep(time.Second)
	idle, err := r.memory()
	if err != nil {
		return err
	}
	s.memory("resident memory, idle", "< 30 MiB", idle, 30)
	client, done, err := r.client()
	if err != nil {
		return err
	}
	defer done()
	count := set.scale(manyRecords)
	for n := range count {
		image, err := r.image(n)
		if err != nil {
			return err
		}
		req, err := r.request(n, image)
		if err != nil {
			return err
		}
		if _, err := client.RuntimeStageVolume(ctx, req); err != nil {
			return err
		}
	}
	time.Sleep(time.Second)
	full, err := r.memory()
	if err != nil {
		return err
	}
	s.memory(fmt.Sprintf("resident memory with %d volumes, staged one by one", count), "< 64 MiB", full, 64)
	r.stop()
	took, err := r.start()
	if err != nil {
		return err
	}
	s.atMost(fmt.Sprintf("start with %d records, to ready", count), "< 1 s", took.Seconds(), 1, fmt.Sprintf("%.2f s", took.Seconds()))
	time.Sleep(time.Second)
	again, err := r.memory()
	if err != nil {
		return err
	}
	s.memory(fmt.Sprintf("resident memory with %d volumes, after a restart", count), "< 64 MiB", again, 64)
	return reads(ctx, r, s, count)
}

func (s *sheet) memory(what, target string, bytes int64, limit float64) {
	mib := float64(bytes) / (1 << 20)
	s.atMost(what, target, mib, limit, fmt.Sprintf("%.1f MiB", mib))
}

const manyCycles = 20000

// growth stages, measures and unstages again and again.
func growth(ctx context.Context, set settings, r *testbed, s *sheet) error {
	ready := r.dir + "/shims-ready"
	disk, err := r.disk(0)
	if err != nil {
		return err
	}
	if err := r.spawn(ready, roleShims, r.sandboxes, "1", "0", disk, ready); err != nil {
		return err
	}
	if _, err := r.start(); err != nil {
		return err
	}
	client, done, err := r.client()
	if err != nil {
		return err
	}
	defer done()
	asked, err := r.bound(ctx, 0, disk)
	if err != nil {
		return err
	}
	second, err := r.disk(1)
	if err != nil {
		return err
	}
	warm := set.scale(manyCycles / 10)
	if err := cycles(ctx, r, client, asked, second, warm); err != nil {
		return err
	}
	memory, fds, routines, err := r.footprint()
	if err != nil {
		return err
	}
	if err := cycles(ctx, r, client, asked, second, set.scale(manyCycles)-warm); err != nil {
		return err
	}
	memoryAfter, fdsAfter, routinesAfter, err := r.footprint()
	if err != nil {
		return err
	}
	grown := float64(memoryAfter-memory) / (1 << 20)
	s.atMost(fmt.Sprintf("growth of memory over %d stage/stats/unstage cycles, after %d to warm up", set.scale(manyCycles)-warm, warm),
		"none (<= 2 MiB)", grown, 2, fmt.Sprintf("%+.1f MiB of %.1f", grown, float64(memory)/(1<<20)))
	s.atMost("growth of open descriptors and goroutines over them", "none", float64(fdsAfter-fds+routinesAfter-routines), 0,
		fmt.Sprintf("%+d, %+d", fdsAfter-fds, routinesAfter-routines))
	return nil
}

func (r *testbed) footprint() (memory int64, fds, routines int, err error) {
	time.Sleep(time.Second)
	metrics, err := r.get("/metrics")
	if err != nil {
		return 0, 0, 0, err
	}
	for line := range strings.SplitSeq(metrics, "\n") {
		if value, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			if _, err := fmt.Sscan(value, &routines); err != nil {
				return 0, 0, 0, err
			}
		}
	}
	if memory, err = r.memory(); err != nil {
		return 0, 0, 0, err
	}
	fds, err = r.descriptors()
	return memory, fds, routines, err
}

// cycles stages a volume and takes it back, and asks a sandbox in between.
func cycles(ctx context.Context, r *testbed, client runtimev1.RuntimeClient, asked *volume, disk string, count int) error {
	req, err := r.request(1, disk)
	if err != nil {
		return err
	}
	v := &volume{request: req}
	for range count {
		if _, err := client.RuntimeStageVolume(ctx, req); err != nil {
			return err
		}
		if _, err := client.RuntimeGetVolumeStats(ctx, asked.stats); err != nil {
			return err
		}
		if _, err := client.RuntimeUnstageVolume(ctx, v.unstage()); err != nil {
			return err
		}
	}
	return nil
}
