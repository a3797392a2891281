package registry

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// bypass is a socket of others in kubelet's directory. kubelet calls the driver behind it directly.
type bypass struct {
	id     socketID
	cancel context.CancelFunc
	driver string // "" until it is known, and if it is no CSI driver
	since  time.Time
}

func (r *Registry) followBypass(ctx context.Context, now *listing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, one := range r.direct {
		if !now.gone(path, one.id) {
			continue
		}
		one.cancel()
		delete(r.direct, path)
		r.departures.Add(cmp.Or(one.driver, strings.TrimSuffix(filepath.Base(path), "-reg.sock")), true, r.times.unsettled)
		// kubelet deregisters by name: our registration of the same driver may have gone with it, and kubelet ignores our
		// socket until it is re-created.
		if ours := r.names[one.driver]; one.driver != "" && ours != nil {
			ours.registerAgain()
		}
	}
	for path, id := range now.found {
		if r.direct[path] != nil || len(r.direct) >= maxSockets {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		one := &bypass{id: id, cancel: cancel}
		r.direct[path] = one
		r.parts.Go(func() { r.askBypass(ctx, path, one) })
	}
}

// askBypass asks until the registrar answers: it may still be starting.
func (r *Registry) askBypass(ctx context.Context, path string, one *bypass) {
	for ctx.Err() == nil {
		info, err := r.check.info(ctx, path)
		if err != nil {
			sys.Sleep(ctx, r.times.lastRetry)
			continue
		}
		if info.GetType() == registration.CSIPlugin {
			r.mu.Lock()
			one.driver, one.since = info.GetName(), time.Now()
			r.mu.Unlock()
			sys.Wake(r.node.soon)
			sys.Wake(r.due)
		}
		return
	}
}

func (r *Registry) reportBypassed() {
	now := r.Bypassed()
	for driver, text := range now {
		if !r.alarmed[driver] {
			r.cfg.Log.Error("a driver has registered with kubelet directly: its volumes are not deferred any more, and pods of "+
				"deferred volumes cannot be started", zap.String("driver", driver), zap.String("problem", text))
			r.alarmed[driver] = true
			r.cfg.Metrics.DriverBypassed(driver, true)
		}
	}
	for driver := range r.alarmed {
		if now[driver] == "" {
			r.cfg.Log.Info("a driver is not registered with kubelet directly any more", zap.String("driver", driver))
			delete(r.alarmed, driver)
			r.cfg.Metrics.DriverBypassed(driver, false)
		}
	}
}

// Bypassed describes, for people, each driver that kubelet calls directly although it has a
// registrar here or deferred volumes.
func (r *Registry) Bypassed() map[string]string {
	out := make(map[string]string)
	for driver, path := range r.directly() {
		if volumes := r.cfg.Front.Deferred(driver); r.isOurs(driver) || len(volumes) > 0 {
			out[driver] = fmt.Sprintf("driver %s has registered with kubelet directly at %s%s: have its registrar use %s "+
				"(its hostPath was lost, perhaps by an upgrade)%s", driver, clip(path), liveHere(volumes), r.cfg.Registry, r.lostBy(driver))
		}
	}
	return out
}

// lostBy describes a driver that kubelet has lost when it moved from us to a direct
// registration. We cannot re-create that socket, which is the registrar's.
func (r *Registry) lostBy(driver string) string {
	if !r.node.missing(driver) {
		return ""
	}
	return "; it is not in the node's CSINode, so that no pods with its volumes are scheduled to this node: if it is to stay registered " +
		"directly, restart its registrar"
}

// mostNamed bounds how many volumes an alarm names.
const mostNamed = 5

func liveHere(volumes []string) string {
	n := len(volumes)
	if n == 0 {
		return ""
	}
	if n > mostNamed {
		volumes = append(volumes[:mostNamed:mostNamed], "...")
	}
	return fmt.Sprintf(", while %d deferred volumes of it live here (%s)", n, strings.Join(volumes, ", "))
}

func (r *Registry) directly() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	direct := make(map[string]string)
	for path, one := range r.direct {
		if one.driver != "" {
			direct[one.driver] = path
		}
	}
	return direct
}

// isOurs reports whether a driver has a registrar or a CSI socket here.
func (r *Registry) isOurs(driver string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.names[driver] != nil || r.served[driver] != nil
}
