package cri

import (
	"context"
	"fmt"
	"slices"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// AddImage gives the node an image of one layer, an uncompressed tar of any size, and
// waits until CRI has heard of it.
func (n *Node) AddImage(name string, layer []byte, entrypoint []string) error {
	if err := n.writeLarge(layer); err != nil {
		return fmt.Errorf("import the layer of %s: %w", name, err)
	}
	if err := n.importImage(name, layer, entrypoint); err != nil {
		return fmt.Errorf("import %s: %w", name, err)
	}
	client := runtimeapi.NewImageServiceClient(n.conn)
	for deadline := time.Now().Add(startTime); ; time.Sleep(20 * time.Millisecond) {
		reply, err := client.ImageStatus(context.Background(), &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: name}})
		if err == nil && reply.GetImage() != nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("CRI does not see the image %s: %w", name, err)
		}
	}
}

// largest is what goes into one message.
const largest = 8 << 20

// writeLarge stores content that does not fit into one message.
func (n *Node) writeLarge(blob []byte) error {
	ctx, cancel := context.WithTimeout(inKubernetes(context.Background()), startTime)
	defer cancel()
	stream, err := contentapi.NewContentClient(n.conn).Write(ctx)
	if err != nil {
		return err
	}
	send := func(request *contentapi.WriteContentRequest) error {
		request.Ref, request.Total, request.Expected = digest(blob), int64(len(blob)), digest(blob)
		if err := stream.Send(request); err != nil {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	offset := int64(0)
	for part := range slices.Chunk(blob, largest) {
		if err := send(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_WRITE, Offset: offset, Data: part}); err != nil {
			return err
		}
		offset += int64(len(part))
	}
	err = send(&contentapi.WriteContentRequest{
		Action: contentapi.WriteAction_COMMIT, Offset: offset,
		Labels: map[string]string{"containerd.io/gc.root": time.Now().UTC().Format(time.RFC3339)},
	})
	if err != nil {
		return err
	}
	return stream.CloseSend()
}
