package cluster

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// askers is how many requests are under way at a time.
const askers = 8

// crowdLabel is what the pods of one crowd have in common.
const crowdLabel = "crowd"

// Crowd is pods that come and go together.
type Crowd struct {
	Pods []*Pod
	name string
	k    *Kube
}

// NewCrowd prepares a pod in a runtime class for each volume, mounted on /data. They are
// the node's from the start: how fast the scheduler is, is not asked.
func (k *Kube) NewCrowd(name, class string, volumes []*Volume) *Crowd {
	crowd := &Crowd{name: name, k: k}
	for _, v := range volumes {
		p := k.NewPod(name+"-"+v.Name, class).With(v, "/data")
		p.Labels, p.Spec.NodeName = map[string]string{crowdLabel: name}, NodeName
		crowd.Pods = append(crowd.Pods, p)
	}
	k.T.Cleanup(crowd.remove)
	return crowd
}

// remove deletes what a test that failed has left.
func (c *Crowd) remove() {
	c.k.check(c.k.Mend())
	for _, p := range c.Pods {
		c.k.check(p.remove())
	}
}

// Start creates the pods at once, and waits until all of them run.
func (c *Crowd) Start(ctx context.Context) error {
	pods := c.k.Client.CoreV1().Pods(Namespace)
	return c.until(ctx, "runs", func(ctx context.Context, p *Pod) error {
		p.UID = ""
		made, err := pods.Create(ctx, p.DeepCopy(), metav1.CreateOptions{})
		if err == nil {
			p.UID = made.UID
		}
		return err
	}, func(event watch.Event, pod *corev1.Pod) bool { return event.Type != watch.Deleted && isReady(pod) })
}

// End deletes the pods at once, and waits until they have gone and the drivers have unstaged their volumes.
func (c *Crowd) End(ctx context.Context) error {
	pods := c.k.Client.CoreV1().Pods(Namespace)
	err := c.until(ctx, "goes", func(ctx context.Context, p *Pod) error {
		return pods.Delete(ctx, p.Name, metav1.DeleteOptions{})
	}, func(event watch.Event, _ *corev1.Pod) bool { return event.Type == watch.Deleted })
	if err != nil {
		return err
	}
	if left := check.Left(Patience, 20*time.Millisecond, staged); len(left) > 0 {
		return fmt.Errorf("volumes are still staged: %q", left)
	}
	return nil
}

// staged lists what is there of volumes on the node before their driver has them back.
func staged() []string {
	var left []string
	for _, pattern := range []string{
		KubeletRoot + "/plugins/kubernetes.io/csi/*.example.com/*", KubeletRoot + "/plugins/kubernetes.io/csi/volumeDevices/*/pvc-*-",
		ProxyRunDir + "/state/*/*.json",
	} {
		found, _ := filepath.Glob(pattern)
		left = append(left, found...)
	}
	return left
}

// until asks for something for each pod, many at a time, and waits until all are done.
func (c *Crowd) until(ctx context.Context, what string, ask func(context.Context, *Pod) error, done func(watch.Event, *corev1.Pod) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pods, which := c.k.Client.CoreV1().Pods(Namespace), metav1.ListOptions{LabelSelector: crowdLabel + "=" + c.name}
	list, err := pods.List(ctx, which)
	if err != nil {
		return err
	}
	which.ResourceVersion = list.ResourceVersion
	endless := rest.CopyConfig(c.k.Admin)
	endless.Timeout = 0
	client, err := kubernetes.NewForConfig(endless)
	if err != nil {
		return err
	}
	events, err := client.CoreV1().Pods(Namespace).Watch(ctx, which)
	if err != nil {
		return err
	}
	defer events.Stop()
	var asking errgroup.Group
	asking.SetLimit(askers)
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for _, p := range c.Pods {
			asking.Go(func() error {
				if err := ask(ctx, p); err != nil {
					cancel(err)
				}
				return nil
			})
		}
		_ = asking.Wait() // none fails: the first error ends the waiting
	}()
	reached := make(map[string]bool)
	_, err = watchtools.UntilWithoutRetry(ctx, events, func(event watch.Event) (bool, error) {
		if pod, isPod := event.Object.(*corev1.Pod); isPod && done(event, pod) {
			reached[pod.Name] = true
		}
		return len(reached) == len(c.Pods), nil
	})
	if err != nil {
		return fmt.Errorf("not every one of %d pods %s, %d are missing: %w", len(c.Pods), what, len(c.Pods)-len(reached), cmp.Or(context.Cause(ctx), err))
	}
	<-asked
	return nil
}
