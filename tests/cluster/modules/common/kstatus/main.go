// Command kstatus prints how Flux, kpt and others judge an object: JSON of the object in, JSON of its status out.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

func main() {
	if err := judge(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "kstatus:", err)
		os.Exit(1)
	}
}

func judge(in io.Reader, out io.Writer) error {
	body, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{}
	if err := object.UnmarshalJSON(body); err != nil {
		return err
	}
	result, err := status.Compute(object)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(map[string]string{
		"status":  result.Status.String(),
		"message": result.Message,
	})
}
