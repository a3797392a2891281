package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const (
	// cleanTime bounds the cleaning up, also after an interrupt.
	cleanTime = 2 * time.Minute
	// deferAnnotation lists volumes that a pod asks to have deferred.
	deferAnnotation = "crust-proxy.dev/defer"
	markFile        = "crust-test-file"
)

// trial is one run of kubectl crust test: a pod with a volume of a class, in a namespace of its own.
type trial struct {
	t                         *tool
	k                         *api
	class, runtimeClass       string
	namespace, image, storage string
	annotate                  bool
	stepTime                  time.Duration

	own        bool   // the namespace is ours
	name, mark string // of all objects, and what the pod writes
	driver     struct {
		Provisioner, ReclaimPolicy string
		AllowVolumeExpansion       bool
	}
	lines  []checked
	pod    pod
	node   *state
	volume *adminv1.Volume
	disk   string // the claim's PersistentVolume, until it is known what becomes of it
}

func (r *trial) flags(set *pflag.FlagSet) {
	set.StringVar(&r.class, "storage-class", "", "the StorageClass to test")
	set.StringVar(&r.runtimeClass, "runtime-class", "", "the pod's RuntimeClass")
	set.StringVarP(&r.namespace, "namespace", "n", "", "where to make claim and pod; empty makes a namespace")
	set.StringVar(&r.image, "image", "busybox:1.36", "an image with a shell")
	set.StringVar(&r.storage, "size", "1Gi", "the claim's size")
	set.BoolVar(&r.annotate, "annotate", false, "ask for the deferral by the pod's annotation")
	set.DurationVar(&r.stepTime, "step-timeout", 3*time.Minute, "how long a step may take")
}

// failure is an error that does not go away by waiting.
type failure struct{ error }

// skipped is why a step is left out.
type skipped string

func (s skipped) Error() string { return string(s) }

type step struct {
	name string
	do   func(context.Context) (string, error)
}

// run makes all steps, up to the first that fails, and cleans up whatever happens.
func (r *trial) run(ctx context.Context) error {
	r.name, r.mark = "crust-test-"+strings.ToLower(rand.Text()[:8]), "mark-"+rand.Text()
	failed := slices.ContainsFunc([]step{
		{"class", r.readClass}, {"created", r.create}, {"written", r.written}, {"deferred", r.deferred}, {"guarded", r.guarded},
		{"stats", r.stats}, {"growth", r.growth}, {"deleted", r.deleted},
	}, func(s step) bool { return !r.make(ctx, s) })
	cleaning, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	failed = !r.make(cleaning, step{"cleaned up", r.clean}) || failed
	if r.t.out.Machine() {
		return printAll(r.t.out, r.lines)
	}
	if failed {
		return command.ErrFindings
	}
	return nil
}

// make makes a step, prints its line, and reports whether it succeeded or was left out.
func (r *trial) make(ctx context.Context, s step) bool {
	began := time.Now()
	text, err := s.do(ctx)
	line := checked{s.name, resultOK, text, ""}
	if err != nil {
		_, left := errors.AsType[skipped](err)
		line.Result, line.Seen = show.Either(left, resultWarn, resultFail), err.Error()
	}
	line.Seen = fmt.Sprintf("%5.1fs  %s", time.Since(began).Seconds(), line.Seen)
	r.lines = append(r.lines, line)
	if !r.t.out.Machine() {
		_ = printChecked(r.t.out, line)
	}
	return line.Result != resultFail
}

// until repeats a try each second until it succeeds.
func (r *trial) until(ctx context.Context, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.stepTime)
	defer cancel()
	for {
		err := try(ctx)
		_, final := errors.AsType[failure](err)
		if _, left := errors.AsType[skipped](err); err == nil || final || left {
			return err
		}
		if !sys.Sleep(ctx, time.Second) {
			return fmt.Errorf("%s: %w: %w", what, context.Cause(ctx), err)
		}
	}
}

func (r *trial) readClass(ctx context.Context) (string, error) {
	err := r.k.get(ctx, "/apis/storage.k8s.io/v1/storageclasses/"+url.PathEscape(r.class), &r.driver)
	return "StorageClass " + r.class + " of driver " + r.driver.Provisioner, err
}

// core is the path of objects in the namespace.
func (r *trial) core(kind string) string { return "/api/v1/namespaces/" + r.namespace + "/" + kind }

func (r *trial) create(ctx context.Context) (string, error) {
	if r.namespace == "" {
		labels := map[string]string{"pod-security.kubernetes.io/enforce": "privileged"} // for the look from the host
		err := r.k.send(ctx, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": r.name, "labels": labels}})
		if !apierrors.IsForbidden(err) && !apierrors.IsAlreadyExists(err) {
			r.namespace, r.own = r.name, true // it may exist although the call fails
		}
		if err != nil {
			return "", err
		}
	}
	claim := object{"metadata": object{"name": r.name}, "spec": object{
		"storageClassName": r.class, "accessModes": []string{"ReadWriteOnce"}, "resources": object{"requests": object{"storage": r.storage}},
	}}
	if err := r.k.send(ctx, http.MethodPost, r.core("persistentvolumeclaims"), claim); err != nil {
		return "", err
	}
	script := "set -e; trap 'exit 0' TERM; echo " + r.mark + " >/data/" + markFile + "; sync; echo written; " +
		"while :; do set -- $(df -Pk /data | tail -n 1); echo size $2; sleep 1 & wait $!; done"
	spec := r.podSpec(script, "/data", object{"persistentVolumeClaim": object{"claimName": r.name}})
	if len(r.t.nodes) > 0 {
		terms := sys.Map(r.t.nodes, func(name string) object {
			return object{"matchFields": []object{{"key": "metadata.name", "operator": "In", "values": []string{name}}}}
		})
		spec["affinity"] = object{"nodeAffinity": object{"requiredDuringSchedulingIgnoredDuringExecution": object{"nodeSelectorTerms": terms}}}
	}
	if r.runtimeClass != "" {
		spec["runtimeClassName"] = r.runtimeClass
	}
	metadata := object{"name": r.name}
	if r.annotate {
		metadata["annotations"] = map[string]string{deferAnnotation: "data"}
	}
	return "pod and claim in namespace " + r.namespace, r.k.send(ctx, http.MethodPost, r.core("pods"), object{"metadata": metadata, "spec": spec})
}

func (r *trial) podSpec(script, path string, volume object) object {
	volume["name"] = "data"
	return object{
		"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "automountServiceAccountToken": false,
		"containers": []object{{
			"name": "main", "image": r.image, "command": []string{"/bin/sh", "-c", script},
			"volumeMounts": []object{{"name": "data", "mountPath": path}},
		}},
		"volumes": []object{volume},
	}
}

func (r *trial) log(ctx context.Context, name string) (string, error) {
	raw, err := r.k.raw(ctx, r.core("pods/"+name+"/log")+"?tailLines=1000")
	return string(raw), err
}

func (r *trial) written(ctx context.Context) (string, error) {
	err := r.until(ctx, "the pod does not run", func(ctx context.Context) error {
		if err := r.k.get(ctx, r.core("pods/"+r.name), &r.pod); err != nil {
			return err
		}
		if log, err := r.log(ctx, r.name); err == nil && strings.Contains(log, "written") {
			return nil
		}
		return errors.New(cmp.Or(r.lastEvent(ctx), r.pod.waits(), r.pod.Status.Phase))
	})
	return "the pod on node " + r.pod.Spec.NodeName + " has written to its volume", err
}

// lastEvent is the last warning about the pod, in which kubelet has the error of a volume that is refused.
func (r *trial) lastEvent(ctx context.Context) string {
	events, _ := list[event](ctx, r.k, r.core("events"), url.Values{"fieldSelector": {"type=Warning,involvedObject.name=" + r.name}})
	if len(events) == 0 {
		return ""
	}
	return events[len(events)-1].Reason + ": " + events[len(events)-1].Message
}

// look asks the daemon of the pod's node for the volume; it is nil if it is not deferred.
func (r *trial) look(ctx context.Context) error {
	if r.node == nil {
		all, _, err := r.t.places(ctx, "")
		if err != nil {
			return failure{err}
		}
		i := slices.IndexFunc(all, func(p place) bool { return p.node == r.pod.Spec.NodeName })
		if i < 0 {
			return failure{errors.New("node " + r.pod.Spec.NodeName + " has no crust-proxy")}
		}
		r.node = &state{place: all[i]}
	}
	r.node.volumes, r.volume = nil, nil
	if r.node.why != "" {
		return failure{errors.New(r.node.why)}
	}
	if err := r.node.askVolumes(ctx, url.Values{"driver": {r.driver.Provisioner}}); err != nil {
		return err
	}
	for _, v := range r.node.volumes {
		if v.GetPodUid() == r.pod.Metadata.UID {
			r.volume = v
		}
	}
	return nil
}

func (r *trial) deferred(ctx context.Context) (string, error) {
	err := r.until(ctx, "the volume is not in its sandbox", func(ctx context.Context) error {
		if err := r.look(ctx); err != nil {
			return err
		}
		switch state := r.volume.GetState(); {
		case r.volume == nil:
			return failure{errors.New("the volume is mounted on the node: no rule defers it (--runtime-class, --annotate; policy.rules in docs/front.md)")}
		case state != adminv1.VolumeState_VOLUME_STATE_BOUND:
			return errors.New("it is " + show.StateName(state) + " " + r.volume.GetLastError())
		}
		return nil
	})
	return fmt.Sprintf("%s, way %s, handler %s, sandbox %s", r.volume.GetRule(), r.volume.GetWay(), r.volume.GetHandler(), show.ShortID(r.volume.GetSandbox().GetId())), err
}

// guarded looks at the volume's target from the host, by an ordinary pod with a hostPath.
func (r *trial) guarded(ctx context.Context) (string, error) {
	name := r.name + "-host"
	spec := r.podSpec("ls -A /host; cat /host/* | head -c 1000", "/host", object{"hostPath": object{"path": r.volume.GetTargetPath(), "type": "Directory"}})
	spec["nodeName"] = r.pod.Spec.NodeName
	switch err := r.k.send(ctx, http.MethodPost, r.core("pods"), object{"metadata": object{"name": name}, "spec": spec}); {
	case apierrors.IsForbidden(err):
		return "", skipped("not looked at from the host: a pod with a hostPath is not admitted here: " + err.Error())
	case err != nil:
		return "", err
	}
	err := r.until(ctx, "the pod that looks does not end", func(ctx context.Context) error {
		var looks pod
		if err := r.k.get(ctx, r.core("pods/"+name), &looks); err != nil {
			return err
		}
		if looks.Status.Phase != "Succeeded" {
			return errors.New(cmp.Or(looks.waits(), looks.Status.Phase))
		}
		log, err := r.log(ctx, name)
		if err == nil && (strings.Contains(log, r.mark) || slices.Contains(strings.Fields(log), markFile)) {
			return failure{errors.New("the host sees the pod's file below " + r.volume.GetTargetPath())}
		}
		if err == nil && strings.TrimSpace(log) == "" {
			return failure{errors.New("the host sees no guard at " + r.volume.GetTargetPath())}
		}
		return err
	})
	return "the host sees a guard, not the pod's file", err
}

func (r *trial) stats(ctx context.Context) (string, error) {
	var usage *adminv1.VolumeUsage
	err := r.until(ctx, "kubelet has asked for no stats, or has none", func(ctx context.Context) error {
		if err := r.look(ctx); err != nil {
			return err
		}
		if usage = show.Usage(r.volume, adminv1.VolumeUsage_UNIT_BYTES); usage == nil {
			return errors.New(cmp.Or(r.volume.GetLastError(), "no answer of the sandbox yet"))
		}
		return nil
	})
	return show.Size(usage.GetUsed()) + " of " + show.Size(usage.GetTotal()) + " used", err
}

func (r *trial) growth(ctx context.Context) (string, error) {
	if !r.driver.AllowVolumeExpansion {
		return "", skipped("the class does not allow it")
	}
	var made claim
	if err := r.k.get(ctx, r.core("persistentvolumeclaims/"+r.name), &made); err != nil {
		return "", err
	}
	size, err := resource.ParseQuantity(cmp.Or(made.Status.Capacity["storage"], r.storage)) // a driver may have a least size
	if err != nil {
		return "", err
	}
	before, err := r.seen(ctx)
	if err != nil {
		return "", err
	}
	want := 2 * size.Value()
	bigger := object{"spec": object{"resources": object{"requests": object{"storage": resource.NewQuantity(want, resource.BinarySI).String()}}}}
	if err := r.k.send(ctx, http.MethodPatch, r.core("persistentvolumeclaims/"+r.name), bigger); err != nil {
		return "", err
	}
	var now int64
	err = r.until(ctx, "the pod's filesystem does not grow", func(ctx context.Context) (err error) {
		now, err = r.seen(ctx)
		if err == nil && (now <= before || now < want*4/5) { // a filesystem needs some of its device
			err = fmt.Errorf("it has %s: %s", show.Size(now), r.lastEvent(ctx))
			if r.look(ctx) == nil && r.volume.GetGrowWaits() != "" {
				err = skipped("its device has " + show.Size(r.volume.GetGrowToBytes()) + ", and the filesystem waits: " + r.volume.GetGrowWaits())
			}
		}
		return err
	})
	return "the pod sees " + show.Size(now) + ", before " + show.Size(before), err
}

// seen is the size of its filesystem that the pod saw last.
func (r *trial) seen(ctx context.Context) (int64, error) {
	var kib int64
	log, err := r.log(ctx, r.name)
	_, last, _ := strings.Cut(log[max(0, strings.LastIndex(log, "size ")):], "size ")
	_, _ = fmt.Sscan(last, &kib)
	return kib << 10, err
}

// remove deletes objects until they are gone.
func (r *trial) remove(ctx context.Context, paths ...string) error {
	var made claim
	if err := r.k.get(ctx, r.core("persistentvolumeclaims/"+r.name), &made); err == nil {
		r.disk = made.Spec.VolumeName
	}
	return r.until(ctx, "something is left: delete it in namespace "+r.namespace, func(ctx context.Context) error {
		var left []error
		for _, path := range paths {
			if err := r.k.send(ctx, http.MethodDelete, path, nil); !apierrors.IsNotFound(err) {
				left = append(left, cmp.Or(err, errors.New(path+" is there")))
			}
		}
		return errors.Join(left...)
	})
}

func (r *trial) made() []string {
	return []string{r.core("pods/" + r.name + "-host"), r.core("pods/" + r.name), r.core("persistentvolumeclaims/" + r.name)}
}

func (r *trial) deleted(ctx context.Context) (string, error) {
	if err := r.remove(ctx, r.made()...); err != nil {
		return "", err
	}
	err := r.until(ctx, "the daemon has the volume", func(ctx context.Context) error {
		if err := r.look(ctx); err != nil || r.volume == nil {
			return err
		}
		return errors.New("it is " + show.StateName(r.volume.GetState()) + " " + r.volume.GetLastError())
	})
	if err != nil {
		return "", err
	}
	return "pod, claim, disk and the daemon's volume are gone", r.diskGone(ctx)
}

// diskGone waits until the PersistentVolume is gone, which is when the driver has deleted the disk. One that is retained
// stays, which is a warning.
func (r *trial) diskGone(ctx context.Context) error {
	name := r.disk
	r.disk = ""
	if name == "" {
		return nil
	}
	var unclear error
	err := r.until(ctx, "PersistentVolume "+name+" is not deleted, and its disk may be left", func(ctx context.Context) error {
		var v persistentVolume
		switch err := r.k.get(ctx, "/api/v1/persistentvolumes/"+url.PathEscape(name), &v); {
		case apierrors.IsNotFound(err):
			return nil
		case apierrors.IsForbidden(err):
			unclear = skipped(fmt.Sprintf("PersistentVolume %s may be left, with its disk: the class says %s, and: %v", name, r.driver.ReclaimPolicy, err))
			return nil
		case err != nil:
			return err
		case v.Spec.ReclaimPolicy == "Retain":
			unclear = skipped("PersistentVolume " + name + " and its disk are retained: delete both")
			return nil
		}
		return errors.New("it is " + v.Status.Phase + " " + v.Status.Message)
	})
	return cmp.Or(err, unclear)
}

// clean removes what the other steps have left.
func (r *trial) clean(ctx context.Context) (string, error) {
	paths, text := r.made(), "in namespace "+r.namespace+" nothing is left"
	switch {
	case r.namespace == "":
		return "nothing was made", nil
	case r.own:
		paths, text = append(paths, "/api/v1/namespaces/"+r.namespace), "namespace "+r.namespace+" is gone"
	}
	if err := r.remove(ctx, paths...); err != nil {
		return "", err
	}
	return text, r.diskGone(ctx)
}

type object = map[string]any

func (k *api) send(ctx context.Context, verb, uri string, body object) error {
	ctx, cancel := context.WithTimeout(ctx, k.patience)
	defer cancel()
	request := k.client.Verb(verb).MaxRetries(0).RequestURI(uri)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content := show.Either(verb == http.MethodPatch, "application/merge-patch+json", "application/json")
		request = request.SetHeader("Content-Type", content).Body(raw)
	}
	_, err := request.Do(ctx).Raw()
	return err
}
